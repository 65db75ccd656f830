"""What the methods of a model share under one strategy: its steps, its data, its agreement with other workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras

from kdist import keras_hooks
from kdist.errors import KdistError
from kdist.training import agreement

if TYPE_CHECKING:
    from kdist.backends.contract import StepFunction
    from kdist.strategies.strategy import Strategy


class Session:
    """A model under its strategy. Lives as long as the model.

    Args:
        strategy: The strategy that the model was created under.
        model: A Keras model.
    """

    def __init__(self, strategy: Strategy, model: Any) -> None:
        # The session is kept in a table of models: a strong reference would keep the model alive.
        self._model = weakref.ref(model)
        self.strategy = strategy
        self.runtime = strategy.runtime
        self._functions: dict[str, tuple[Any, StepFunction]] = {}
        self._num_shared = -1

    @property
    def model(self) -> Any:
        """The model."""
        return self._model()

    @property
    def is_chief(self) -> bool:
        """Whether this worker prints and writes shared files."""
        return self.runtime.worker_index == 0

    def verbose(self, wanted: Any) -> Any:
        """The `verbose` argument for this worker: only the chief prints."""
        return wanted if self.is_chief else 0

    def function(self, kind: str) -> StepFunction:
        """Returns the step function of a kind ("train", "test", "predict"); made anew after `compile`."""
        model = self.model
        key = (
            getattr(model, "optimizer", None),
            getattr(model, "_compile_loss", None),
            getattr(model, "_compile_metrics", None),
            bool(getattr(model, "run_eagerly", False)),
            getattr(model, "_jit_compile", None),
            tuple(v.trainable for v in model.variables),
        )
        cached = self._functions.get(kind)
        if cached is None or any(a is not b and a != b for a, b in zip(cached[0], key, strict=True)):
            make = getattr(self.runtime, f"{kind}_function")
            cached = self._functions[kind] = (key, make(model))
        return cached[1]

    def iterator(self, **arguments: Any) -> GlobalBatches:
        """Returns the global batches of an epoch, the same ones in the same order on every worker."""
        from kdist.backends import get_backend

        return GlobalBatches(self, keras_hooks.epoch_iterator(get_backend().name, **arguments))

    def prepare(
        self, batches: GlobalBatches | None = None, data_batch: Any = None, layers_only: bool = False
    ) -> None:
        """Creates what variables are missing and makes them equal on all workers."""
        with self.strategy.scope():
            if layers_only:
                keras_hooks.build_layers(self.model, data_batch)
            elif batches is not None:
                self.model._symbolic_build(iterator=batches.iterator)
            else:
                keras_hooks.build(self.model, data_batch)
        variables = keras_hooks.all_variables(self.model)
        if len(variables) != self._num_shared:
            agreement.check_model(self.runtime, self.model, variables)
            if self.runtime.num_workers > 1:
                self.runtime.broadcast_variables(variables)
            self._num_shared = len(variables)

    @contextmanager
    def engine_errors(self) -> Iterator[None]:
        """Lets an error of the engine name the worker that was lost."""
        try:
            yield
        except KdistError:
            raise
        except Exception as error:
            explained = self.runtime.explain_failure(error)
            if explained is error:
                raise
            raise explained from error


class GlobalBatches:
    """The global batches of an epoch: Keras's own iterator, with the workers' agreement on top.

    Args:
        session: The model and its strategy.
        iterator: Keras's `EpochIterator`.
    """

    def __init__(self, session: Session, iterator: Any) -> None:
        self._session = session
        self.iterator = iterator
        # Arrays are compared before the first step; other data may end anywhere on any worker.
        self._known_length = hasattr(iterator.data_adapter, "_num_samples")

    @property
    def num_batches(self) -> int | None:
        """Steps of an epoch, where known."""
        return self.iterator.num_batches

    def facts(self) -> dict[str, Any]:
        """What must be the same on all workers, before the first step."""
        adapter = self.iterator.data_adapter
        return {
            "kind of data": type(adapter).__name__,
            "number of rows": getattr(adapter, "_num_samples", None),
            "batch size": adapter.batch_size,
            "steps": self.iterator.num_batches,
        }

    def share_random_state(self) -> None:
        """Gives every worker the chief's random state: all shuffle as the chief alone would.

        Once the workers agree on their data, and at the beginning of each epoch, since workers may have drawn
        different numbers in the one before: in a callback, or in a layer that draws as many as it has rows.
        """
        from kdist.backends import get_backend

        runtime = self._session.runtime
        if keras_hooks.shuffles_arrays(self.iterator) and runtime.num_workers > 1:
            backend = get_backend()
            backend.set_random_state(runtime.all_gather_bytes(backend.random_state())[0])

    def reset(self) -> None:
        """Starts again from the first batch."""
        self.iterator.reset()

    def __iter__(self) -> Iterator[tuple[int, int, Sequence[Any]]]:
        """Yields the index of the first and the last step, and the batches of one execution."""
        runtime = self._session.runtime
        must_agree = runtime.num_workers > 1 and not self._known_length
        step = -1
        self.share_random_state()
        for begin, end, data in self.iterator:
            if must_agree:
                for offset in range(self.iterator.steps_per_execution):
                    rows = num_rows(data[offset]) if offset < len(data) else 0
                    agreement.agree_on_batch(runtime, rows, begin + offset)
            step = end
            yield begin, end, data
        if must_agree and not self._ended_by_count(step):
            agreement.agree_on_batch(runtime, 0, step + 1)

    def _ended_by_count(self, last_step: int) -> bool:
        limit = self.iterator.steps_per_epoch
        return bool(limit) and last_step + 1 >= limit


def num_rows(batch: Any) -> int:
    """Returns the rows of a global batch: the length of its first array."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def session_of(strategy: Strategy, model: Any) -> Session:
    """Returns the session of a model, creating it at the first call."""
    if model not in _sessions:
        _sessions[model] = Session(strategy, model)
    return _sessions[model]
