"""`DriftWatch`, a callback that checks that all replicas still have the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from kdist.errors import check_whole
from kdist.synchrony import check_in_sync
from kdist.training.session import progress_of


class DriftWatch(keras.callbacks.Callback):
    """Compares weights, optimizer, metrics and seeds of all replicas regularly, and fails if they differ.

    Replicas can diverge, for example if a script changes a variable on only one worker, or if memory is
    faulty. Without this callback, training continues with wrong values. A comparison costs one pass over the
    values and one small message.

    Args:
        every: The number of steps between comparisons. The callback also compares at the end of each epoch.

    Raises:
        WorkerMismatchError: If replicas differ. `fit` raises it on all workers, with the variable and worker.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.DriftWatch(every=500)])
    ```
    """

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        check_whole("every", every, "Pass a number of steps: kdist.callbacks.DriftWatch(every=500)")
        self.every = every

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Starts to count the steps."""
        self._progress = progress_of(self.model)
        self._compared = self._progress.num_steps

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Compares the replicas every `every` steps."""
        if self._progress.num_steps - self._compared >= self.every:
            self._compare()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Compares the replicas."""
        self._compare()

    def _compare(self) -> None:
        self._compared = self._progress.num_steps
        check_in_sync(self.model)
