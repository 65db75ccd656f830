"""`StepCheckpoints`: the callback that saves every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kdist.checkpoint.manager import CheckpointManager


class StepCheckpoints(keras.callbacks.Callback):
    """Saves every so many steps and at the end; the number of a checkpoint is that of its steps.

    Args:
        manager: Saves.
        done: Steps that were trained before.
        every: Steps from one checkpoint to the next.
        after: Called on each worker once a checkpoint is complete.
    """

    def __init__(
        self, manager: CheckpointManager, done: int, every: int, after: Callable[[], Any] | None
    ) -> None:
        super().__init__()
        self._manager, self._every, self._after = manager, every, after
        self._begin, self._step, self._saved = done, done, done

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, where it is time."""
        self._step = self._begin + batch + 1
        if self._step // self._every > self._saved // self._every:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Saves the last step."""
        if self._saved < self._step:
            self._save()

    def _save(self) -> None:
        self._saved = self._step
        self._manager.save(self._step, check_interval=False)
        if self._after is not None:
            self._manager.wait()
            self._after()
