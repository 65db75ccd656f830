"""The training steps of `fit`, which are scheduled on the workers without waiting for each step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kdist import keras_hooks
from kdist.arrays import rows
from kdist.backends import get_backend
from kdist.backends.contract import ReplicaBatches, Runtime, StepFunction
from kdist.backends.coordination import Coordination, PerWorkerValues
from kdist.errors import DatasetError

_READS = "kdist_reads_a_batch"  # in the names of operations, and therefore in their errors
_AHEAD = 2  # pending and running steps per worker, so that a worker always finds its next step


class ScheduledSteps(StepFunction):
    """Schedules the training steps of a model."""

    def __init__(self, coordination: Coordination, model: keras.Model) -> None:
        self._coordination = coordination
        self._function = TrainStep(model)
        self._logs: dict[str, object] = {}
        self._num_done = 0

    def __call__(self, batches: Sequence[ReplicaBatches]) -> object:
        """Schedules a step for each batch, and returns the newest logs."""
        self._coordination.closures.wait(_AHEAD * self._coordination.num_workers - 1)
        # Per-worker iterators are sent unchanged.
        parts = [batch.parts[0] for batch in batches]
        data = [part if isinstance(part, PerWorkerValues) else rows.to_host(part) for part in parts]
        # TensorFlow applies all updates of a function at its end, so each step needs a separate call.
        for part in [[one] for one in data] if self._coordination.places_variables else [data]:
            result = self._coordination.schedule(
                self._function, (part,), {}, functools.partial(self._take, len(part))
            )
        if not self._logs or self._coordination.closures.are_in_turn:  # `fit` needs logs at once
            result.fetch()
        return self._logs

    def _take(self, num_steps: int, logs: Any) -> None:
        self._num_done += num_steps
        self._logs.update(logs)  # in place: earlier callers get the newest logs after `sync`

    def sync(self) -> None:
        self._coordination.closures.wait()
        self._logs = {}

    def __exit__(self, kind: type[BaseException] | None = None, *exc: Any) -> None:
        num_done, self._num_done = self._num_done, 0
        if kind is None:
            self.sync()
            return
        self._coordination.closures.cancel()
        # On TensorFlow, an iterator in the user's `train_step` raises the same kind of error.
        is_ours = not self._coordination.places_variables or _READS in str(exc[0])
        if is_ours and issubclass(kind, self._coordination.end_of_data):
            raise DatasetError(
                "The dataset of a worker ended before the last step of `fit`.",
                received={"steps": num_done},
                hint="Pass fewer steps_per_epoch or epochs, or repeat the dataset: dataset.repeat()",
            ) from exc[0]


class TrainStep:
    """Trains a model on some batches. This function runs on a worker."""

    any_rows = True

    def __init__(self, model: keras.Model) -> None:
        # The session of the model contains this step, and would keep the model alive.
        self._model: Callable[[], Any] = weakref.ref(model)

    def __getstate__(self) -> keras.Model:
        return self.model

    def __setstate__(self, model: keras.Model) -> None:
        self._model = lambda: model  # on a worker, only this step has the model

    @property
    def model(self) -> keras.Model:
        return self._model()

    def __call__(self, batches: Sequence[Any]) -> object:
        strategy: Any = keras_hooks.strategy_of(self.model)
        for batch in batches:
            with keras.name_scope(_READS):
                data = batch.get_next() if hasattr(batch, "get_next") else batch
            logs = strategy.run(self.step, (data,))
        return logs

    def step(self, data: object) -> object:
        engine = get_backend().coordination_engine
        return self.model.train_step(data) if engine is None else engine().train_step(self.model, data)


class CoordinatorRuntime:
    """The runtime of the coordinator's device, except that workers train and servers hold the variables."""

    takes_variables = True

    def __init__(
        self,
        runtime: Runtime,
        coordination: Coordination,
        steps: Callable[[Coordination, keras.Model], StepFunction],
    ) -> None:
        self._runtime = runtime
        self._coordination = coordination
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context manager for the strategy's scope."""
        local = contextlib.nullcontext() if self._coordination.places_variables else self._runtime.scope()
        with local, self._coordination.scope():
            yield

    def finish_steps(self) -> None:
        """Waits until the servers have applied all scheduled steps."""
        self._coordination.closures.wait()

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Moves new variables to the servers."""
        self._coordination.give(variables)

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        """Returns a function that trains on the workers, or that evaluates or predicts on the coordinator."""
        if kind == "train":
            return self._steps(self._coordination, model)
        return self._runtime.step_function(model, kind)
