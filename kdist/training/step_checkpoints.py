"""`StepCheckpoints`, a callback that saves a checkpoint every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras

from kdist.checkpoint.manager import CheckpointManager


class StepCheckpoints(keras.callbacks.Callback):
    """Saves a checkpoint every `every` steps and at the end, numbered by the step.

    Args:
        manager: The manager that saves the checkpoints.
        done: The number of steps that were trained before.
        every: The number of steps between checkpoints.
        after: A function that every worker calls after each complete checkpoint.
    """

    def __init__(
        self, manager: CheckpointManager, done: int, every: int, after: Callable[[], object] | None
    ) -> None:
        super().__init__()
        self._manager, self._every, self._after = manager, every, after
        self._begin, self._step, self._saved = done, done, done

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Saves a checkpoint if it is due."""
        self._step = self._begin + batch + 1
        if self._step // self._every > self._saved // self._every:
            self._save()

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        """Saves the last step, unless its checkpoint exists, and waits until the checkpoint is complete."""
        if self._saved < self._step:
            self._save()
        self._manager.wait()  # the next call may evaluate it or announce the end; plain Keras does not wait

    def _save(self) -> None:
        self._saved = self._step
        self._manager.save(self._step, check_interval=False)
        if self._after is not None:
            self._manager.wait()
            self._after()
