"""`Throughput`: a callback that says how fast the workers train, what they wait for, and who is the slowest."""

from __future__ import annotations

from typing import Any

import keras

from kdist.backends.messages import gather
from kdist.tracing import Meter, Totals
from kdist.tracing.pace import pace_of
from kdist.training.session import progress_of


class Throughput(keras.callbacks.Callback):
    """Adds the speed of training to the logs of each epoch: the progress bar and the history show it.

    The logs get

    - `rows_per_second`: rows of global batches. The first step after `compile`, which takes longer, is left out;
    - `waiting_for_input`: the share of the time in which a worker waits for its data, as a mean over the workers;
    - `waiting_for_others`: the share in which it waits for other workers, as far as kdist can tell: on JAX and
      TensorFlow, which exchange inside of the compiled step, what a worker computes there is not seen;
    - `slowest_worker`: the index of the worker that the others have waited for.

    The last two are there with several workers only. All are the same on every worker, for one small message an epoch.
    Pass it on all workers, and before a callback that is to see its numbers, such as `CSVLogger`.

    Raises:
        WorkerMismatchError: From `fit`: not all workers have this callback.

    Example:

    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.Throughput()])
    ```
    """

    on_all_workers = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to measure."""
        progress = progress_of(self.model)
        self._runtime = progress.runtime
        self._meter = progress.at_end.enter_context(Meter())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Leaves out what was between the epochs."""
        self._meter.take()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the workers, and adds to the logs."""
        runtime = self._runtime
        mine = self._meter.take()
        everyone = [Totals(**theirs) for theirs in gather(runtime, mine.as_json())]
        if logs is None or not mine.steps:
            return
        pace = pace_of(everyone, runtime.exchanges_in_programs)
        # Where each worker has a dataset of its own, nobody has counted the rows.
        logs |= {"rows_per_second": pace.rows_per_second} if mine.rows else {}
        logs["waiting_for_input"] = pace.waiting_for_input
        if runtime.num_workers > 1:
            logs |= {"waiting_for_others": pace.waiting_for_others, "slowest_worker": pace.slowest}
