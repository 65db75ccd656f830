"""`Session`, the state that `fit`, `evaluate` and `predict` of a model share under a strategy."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kdist import keras_hooks, tracing
from kdist.backends import get_backend
from kdist.backends.contract import StepFunction
from kdist.backends.messages import call_on_all, check_equal, read_on_all
from kdist.context import StrategyLike
from kdist.errors import InvalidArgumentError, StrategyScopeError, WorkerFailedError, check_whole
from kdist.training import keras_callbacks, probe
from kdist.training.batches import GlobalBatches
from kdist.training.progress import Progress

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import T
    from kdist.training.keras_callbacks import UserCallbacks
    from kdist.training.voting import Ballot


_SAME_CALL = "Pass the same arguments on every worker. kdist shards the data."


class Session:
    """A model and its strategy, with its step functions. The session lives as long as the model."""

    def __init__(self, strategy: StrategyLike, model: keras.Model) -> None:
        # `_sessions` refers to this session, so a strong reference would keep the model alive.
        self._model = weakref.ref(model)
        self.strategy = strategy
        self.runtime = strategy.runtime
        self._functions: dict[str, tuple[tuple[object, ...], StepFunction]] = {}
        self._num_shared = -1
        # The step functions that have not run yet, because their first step compiles.
        self._unused: set[str] = set()
        self.progress: Progress | None = None
        """The position of `fit` while it runs."""
        self.validation: tuple[GlobalBatches, Ballot] | None = None
        """The validation data and the votes while a method `evaluate` of the user runs in `fit`."""
        # Whether this worker has loaded weights, which may differ from the weights of other workers.
        self.has_loaded = False

    @property
    def model(self) -> keras.Model:
        return self._model()

    def callback_list(
        self,
        callbacks: UserCallbacks,
        verbose: str | int,
        batches: GlobalBatches,
        epochs: int = 1,
        **arguments: object,
    ) -> keras.callbacks.CallbackList:
        """Returns Keras's `CallbackList` for this worker. Only the chief shows a progress bar."""
        verbose = verbose if self.runtime.worker_index == 0 else 0
        return keras_hooks.callback_list(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=batches.num_batches,
            model=self.model,
            **arguments,
        )

    def function(self, kind: str) -> StepFunction:
        """Returns the step function of a kind ("train", "test", "predict").

        `compile` invalidates it. So does the user, as in Keras: `make_train_function(force=True)` or
        `model.train_function = None` makes a changed Python attribute effective.
        """
        model = self.model
        is_reset = keras_hooks.is_reset(model, kind)
        key = keras_hooks.compiled_state(model)
        cached = self._functions.get(kind)
        if (
            cached is None
            or is_reset
            or any(a is not b and a != b for a, b in zip(cached[0], key, strict=True))
        ):
            step = self.runtime.step_function(model, kind)
            cached = self._functions[kind] = (key, probe.at_first_batch(step, self.strategy, model, kind))
            self._unused.add(kind)
        return cached[1]

    def step_span(
        self, kind: str, begin: int, end: int, rows: int | None = None
    ) -> AbstractContextManager[object]:
        """Returns a span for one execution of the steps from `begin` to `end`, which are indices.

        Training steps pass their number of `rows` over all replicas.
        """
        about: dict[str, object] = {"step": begin + 1}
        if rows is not None:
            about |= {"steps": end + 1 - begin, "rows": rows}
        name = "step" if kind == "train" else f"{kind} step"
        if kind in self._unused:
            self._unused.discard(kind)
            name, about["first"] = f"first {name}", True
        if self.runtime.exchanges_in_programs and self.runtime.num_replicas > 1:
            name += ", exchange inside"
        return tracing.span(name, "step", **about)

    def iterator(self, **arguments: Any) -> GlobalBatches:
        """Returns the batches of an epoch, from data that all workers pass or from a distributed dataset.

        Raises:
            InvalidArgumentError: If `batch_size` is not a whole number of at least 1. Some backends would silently read
                nothing.
        """
        batch_size = arguments.get("batch_size")
        if batch_size is not None:
            hint = "Pass the number of rows over all replicas, for example: batch_size=32"
            arguments["batch_size"] = check_whole("batch_size", batch_size, hint)
        defaults = {"shuffle": False, "steps_per_execution": self.model.steps_per_execution}
        return GlobalBatches(self.runtime, self.model.name, **defaults | arguments)

    def open_data(self, function: Callable[[], T]) -> T:
        """Calls a function that creates iterators. Keras reads ahead here, which may fail on one worker."""
        return read_on_all(self.runtime, "Reading the data", function)

    def agree(
        self, what: str, facts: Mapping[str, object], callbacks: UserCallbacks = None
    ) -> AbstractContextManager[UserCallbacks]:
        """Raises an error unless all workers have the same facts. The error contains `what`.

        Returns a context manager that yields the callbacks that this worker runs.
        """
        note = {"loaded": self.has_loaded, "files": keras_callbacks.describe(callbacks)}
        notes = check_equal(self.runtime, what, facts, _SAME_CALL, note)
        if any(note["loaded"] for note in notes):
            self._num_shared = -1
        runtime = self.runtime
        return keras_callbacks.of_this_worker(
            callbacks, runtime.worker_index, notes[0]["files"], runtime.divides_over_workers
        )

    def run_callbacks(self, function: Callable[[], None]) -> bool:
        """Calls callbacks on every worker and waits for all. Returns whether any worker has set `model.stop_training`.

        In this case, all workers set it. All workers take the initial epoch of the chief, and also its weights if
        any worker has loaded weights.

        Raises:
            WorkerFailedError: If a callback failed on another worker. That worker raises its original error.
        """
        model = self.model
        _, said = call_on_all(
            self.runtime,
            function,
            lambda index, text: WorkerFailedError(
                f"Worker {index} failed in a callback: {text}",
                received={"failed_worker": index},
                hint=f"Read the traceback in the log of worker {index}.",
            ),
            lambda: {
                "stop": bool(model.stop_training),
                "initial epoch": keras_hooks.initial_epoch(model),
                "loaded": self.has_loaded,
            },
            "callbacks",
        )
        model.stop_training = stops = any(theirs["stop"] for theirs in said)
        keras_hooks.set_initial_epoch(model, said[0]["initial epoch"])
        if any(theirs["loaded"] for theirs in said):
            self._share(keras_hooks.all_variables(model))
        return stops

    def prepare(
        self, batches: GlobalBatches | None = None, data_batch: object = None, layers_only: bool = False
    ) -> None:
        """Creates missing variables, and makes all variables equal on all workers."""
        with self.strategy.scope():
            if layers_only:
                keras_hooks.build_layers(self.model, get_backend().steps_build, data_batch)
            elif batches is not None:
                batches.build(self.model)
            else:
                keras_hooks.build(self.model, get_backend().steps_build, data_batch=data_batch)
        variables = keras_hooks.all_variables(self.model)
        if len(variables) != self._num_shared:
            # First, because variables that are shared are not checked again.
            self._check_states()
            self._check_layouts(variables)
            self._share(variables)

    def _check_layouts(self, variables: list[keras.Variable]) -> None:
        sharded = self.runtime.topology.sharded
        unused = sharded.unused_rules() if sharded else []
        outputs = [f"{path}/output" for path in keras_hooks.layer_paths(self.model)] if unused else []
        unused = [rule for rule in unused if not any(re.fullmatch(rule, path) for path in outputs)]
        if unused:
            raise InvalidArgumentError(
                "Some layout patterns match no variable.",
                received={"layouts": unused, "paths": [variable.path for variable in variables][:20]},
                hint='Write patterns that match whole paths, such as ".*dense/kernel".',
            )

    def _check_states(self) -> None:
        if self.runtime.num_replicas == 1 or self.runtime.sees_all_rows:
            return
        if layers := keras_hooks.stateful_recurrent_layers(self.model):
            raise InvalidArgumentError(
                "A recurrent layer with stateful=True cannot run on several replicas. Its state has one row per row of "
                "the global batch. With this backend, a replica has only a part of these rows.",
                received={"layers": layers, "replicas": self.runtime.num_replicas},
                hint="Use the JAX backend (export KERAS_BACKEND=jax), or one device.",
            )

    def _share(self, variables: list[keras.Variable]) -> None:
        # Without names, because their counters ("dense_1") depend on earlier models of the worker.
        check_equal(
            self.runtime,
            "model",
            {
                "class": type(self.model).__name__,
                "variables": [[list(v.shape), str(v.dtype)] for v in variables],
            },
            "Run the same script on every worker, without branches that depend on the worker.",
        )
        if self.runtime.takes_variables:
            self.runtime.broadcast_variables(variables)
        self._num_shared = len(variables)
        self.has_loaded = False


_sessions: weakref.WeakKeyDictionary[keras.Model, Session] = weakref.WeakKeyDictionary()


def note_loaded(strategy: StrategyLike, model: keras.Model) -> None:
    """Records that this worker has loaded weights. The hook of Keras's `load_weights` calls it."""
    session_of(strategy, model).has_loaded = True


def session_of(strategy: StrategyLike, model: keras.Model) -> Session:
    """Returns the session of a model. The first call creates it."""
    if model not in _sessions:
        _sessions[model] = Session(strategy, model)
    return _sessions[model]


def progress_of(model: keras.Model) -> Progress:
    """Returns the position of the `fit` of a model, for callbacks, and enables saving it.

    Raises:
        StrategyScopeError: If the model was created outside the scope of a strategy, or `fit` is not running.
    """
    strategy = keras_hooks.strategy_of(model)
    if strategy is None:
        raise StrategyScopeError(
            "This callback cannot be used, because the model was created outside the scope of a strategy.",
            received={"model": model.name},
            hint="Create the model, also for one worker, in: with kdist.MultiWorkerMirroredStrategy().scope():",
        )
    progress = session_of(strategy, model).progress
    if progress is None:
        raise StrategyScopeError(
            "This callback was used outside `fit`.",
            received={"model": model.name},
            hint="Pass it to `fit`: model.fit(x, y, callbacks=[callback])",
        )
    progress.record()
    return progress
