"""`DriftWatch`: a callback that makes sure that all replicas still have the same weights."""

from __future__ import annotations

from typing import Any

import keras

from kdist.errors import InvalidArgumentError
from kdist.synchrony import check_in_sync
from kdist.training.session import progress_of


class DriftWatch(keras.callbacks.Callback):
    """Compares weights, optimizer, metrics and seeds of all workers now and then, and raises where they differ.

    A worker may drift away because a script changes a variable on one worker only, or because its memory is
    broken; without this, training goes on with garbage. A comparison costs one pass over the values and one small
    message.

    Args:
        every: Steps from one comparison to the next. The end of each epoch is compared, too.

    Raises:
        WorkerMismatchError: From `fit`, on all workers: names the first variable that differs, and the worker.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.DriftWatch(every=500)])
    ```
    """

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise InvalidArgumentError(
                "`every` is not a positive number of steps.",
                received={"every": every},
                hint="Pass a positive integer: kdist.callbacks.DriftWatch(every=500)",
            )
        self.every = every

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count."""
        self._progress = progress_of(self.model)
        self._compared = self._progress.num_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compares, where it is time."""
        if self._progress.num_steps - self._compared >= self.every:
            self._compare()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares."""
        self._compare()

    def _compare(self) -> None:
        self._compared = self._progress.num_steps
        check_in_sync(self.model)
