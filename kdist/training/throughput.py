"""`Throughput`, a callback that measures training speed and waiting times, and finds the slowest worker."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from kdist.backends.messages import gather
from kdist.tracing import Meter, Totals
from kdist.tracing.pace import pace_of
from kdist.training.session import progress_of


class Throughput(keras.callbacks.Callback):
    """Adds the training speed to the logs of each epoch, for the progress bar and the history.

    The new logs are:

    - `rows_per_second`: rows of global batches per second, without the slower first step after `compile`.
    - `waiting_for_input`: the share of the time that a worker waits for data, averaged over all workers.
    - `waiting_for_others`: the share of the time that a worker waits for other workers. On JAX and
      TensorFlow, the compiled step includes the exchange, so workers that are slow inside it are not visible.
    - `slowest_worker`: the index of the worker that the others wait for.

    The last two logs require several workers. All workers log the same values, which costs one small message per
    epoch. Pass the callback on all workers, before callbacks that read its values, such as `CSVLogger`.

    Raises:
        WorkerMismatchError: If not all workers have this callback. `fit` raises it.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.Throughput()])
    ```
    """

    on_all_workers = True

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Starts to measure."""
        progress = progress_of(self.model)
        self._runtime = progress.runtime
        self._meter = progress.at_end.enter_context(Meter())

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Excludes the time between epochs from the measurement."""
        self._meter.take()

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Compares the workers, and adds the results to the logs."""
        runtime = self._runtime
        mine = self._meter.take()
        everyone = [Totals(**theirs) for theirs in gather(runtime, mine.as_json())]
        if logs is None or not mine.steps:
            return
        pace = pace_of(everyone, runtime.exchanges_in_programs)
        # The number of rows is unknown (0) if each worker reads its own dataset.
        logs |= {"rows_per_second": pace.rows_per_second} if mine.rows else {}
        logs["waiting_for_input"] = pace.waiting_for_input
        if runtime.num_workers > 1:
            logs |= {"waiting_for_others": pace.waiting_for_others, "slowest_worker": pace.slowest}
