"""Models: `fit` and its relatives dispatch on the strategy a model was created under."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist import context, handlers
from kdist.keras_hooks import trainer
from kdist.keras_hooks.wrapping import strategies, strategy_of, wrap

MODEL_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def hook_models() -> None:
    import keras

    base = trainer.base_trainer()

    def remember(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        strategy = context.current_strategy() if context.in_cross_replica_context() else None
        if strategy is not None:
            strategies[self] = strategy

    def compile(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> None:
        if strategy_of(self) is None and context.in_cross_replica_context():
            name = getattr(self, "name", type(self).__name__)
            warnings.warn(
                f"Model {name} was created outside the scope of the strategy, so `fit` trains it on one device. "
                "Create it inside `with strategy.scope():`.",
                stacklevel=3,
            )
        original(self, *args, **kwargs)

    wrap(base, "__init__", remember)
    wrap(base, "compile", compile)

    for name in MODEL_METHODS:
        # Where the method is defined: a `Trainer` need not be a `keras.Model`.
        owner = next(owner for owner in keras.Model.__mro__ if name in vars(owner))
        wrap(owner, name, functools.partial(_dispatch, name))


def _dispatch(name: str, original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(self)
    if strategy is None:
        handlers.call(
            "refuse_distributed", self, name, *args[:1], *[v for k, v in kwargs.items() if k == "x"]
        )
        with _outside_of_scopes():
            return original(self, *args, **kwargs)
    with without_distribution():
        return handlers.call(name, strategy, self, *args, **kwargs)


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """Within this, Keras sees no `keras.distribution`: the strategy, which says the same, does all there is to do."""
    import keras

    current = keras.distribution.distribution()
    if current is None:
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(current)


def _outside_of_scopes() -> contextlib.AbstractContextManager[Any]:
    """For models that belong to no strategy: one that happens to be in scope must not touch them."""
    strategy = context.current_strategy()
    return contextlib.nullcontext() if strategy is None else strategy.runtime.suspended()


# Whether kdist made PyTorch's process group: then plain models have no part in it.
_owns_process_group = False


def claim_process_group(is_ours: bool) -> None:
    """Notes whether kdist made PyTorch's process group, and not the user."""
    global _owns_process_group
    _owns_process_group = is_ours


def hook_torch_distribution() -> None:
    """Keeps Keras 3.16 from using PyTorch's process group where it must not.

    Keras 3.16 makes every model a DDP model when a process group exists, and sums metrics over all processes.
    kdist has done both for a strategy's models. Other models stay local, since any worker may call them alone; unless
    the process group is the user's, or `keras.distribution` asks for it.
    """
    import keras

    def is_local(model: Any) -> bool:
        ours = _owns_process_group and keras.distribution.distribution() is None
        return ours or strategy_of(model) is not None

    def own_metrics(owner: Any, original: Callable[..., Any], self: Any) -> Any:
        return super(owner, self).get_metrics_result() if is_local(self) else original(self)

    def initialize(original: Callable[..., Any], self: Any) -> None:
        if not is_local(self):
            original(self)

    for owner in keras.Model.__mro__:
        if owner.__module__ == "keras.src.backend.torch.trainer":
            if "get_metrics_result" in vars(owner):
                wrap(owner, "get_metrics_result", functools.partial(own_metrics, owner))
            if "_initialize_ddp" in vars(owner):
                wrap(owner, "_initialize_ddp", initialize)


def build(model: Any, steps_build: bool, **first: Any) -> None:
    """Creates the variables of model, metrics, loss and optimizer from the shapes of one global batch.

    Args:
        model: A compiled model.
        steps_build: Whether the backend's steps can create variables, too. A model with a step of its own may have
            no `call` to be built by, or one that is not for this data: Keras leaves it to its step there.
        **first: `data_batch`, or an `iterator` of Keras's that begins with it.
    """
    _unless_steps_build(model, steps_build, lambda: model._symbolic_build(**first))


def _unless_steps_build(model: Any, steps_build: bool, function: Callable[[], Any]) -> None:
    import keras

    def is_own(*methods: str) -> bool:
        return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in methods)

    may_wait = steps_build and is_own("train_step", "test_step", "predict_step")
    if may_wait and not is_own("call"):
        return
    try:
        function()
    except Exception:
        # That of a `call` which is not for this data says nothing of the step, which raises its own if it fails, too.
        if not may_wait:
            raise


def build_layers(model: Any, steps_build: bool, data_batch: Any) -> None:
    """Creates the variables of the layers alone, for a model that was not compiled; see `build`."""
    import keras
    from keras.src import backend

    if trainer.layers_are_built(model):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
    symbolic = keras.tree.map_structure(
        lambda v: None if v is None else keras.KerasTensor(v.shape, keras.backend.standardize_dtype(v.dtype)),
        x,
    )
    _unless_steps_build(
        model, steps_build, lambda: backend.compute_output_spec(model, symbolic, training=False)
    )


def layer_paths(model: Any) -> list[str]:
    """Returns the paths of a model's layers, by which they ask for the layout of what they return."""
    return [layer.path for layer in model._flatten_layers() if getattr(layer, "path", None)]


def all_variables(model: Any) -> list[Any]:
    """All Keras variables of a model, its seeds, metrics and optimizer included, in one order on all workers."""
    optimizer = getattr(model, "optimizer", None)
    parts = [
        *model.variables,
        *(model.metrics_variables if getattr(model, "compiled", False) else ()),
        *getattr(optimizer, "variables", ()),
        *model.non_trainable_variables,
    ]
    return list({id(variable): variable for variable in parts}.values())


def joined_ragged(parts: Sequence[Any]) -> Any:
    """Keras's own way, on TensorFlow, to join the outputs of batches that differ in more than their rows."""
    from keras.src.backend.tensorflow import trainer as tensorflow_trainer

    return tensorflow_trainer.convert_to_np_if_not_ragged(tensorflow_trainer.potentially_ragged_concat(parts))


def reads_logs_at_once(callbacks: Any) -> bool:
    """Says whether Keras's list turns the logs of a step into numbers, and waits for them, before it calls callbacks.

    Else it does so in a thread, or it is a list of the user's.
    """
    import keras

    return type(callbacks) is keras.callbacks.CallbackList and not getattr(callbacks, "_async_train", False)


def callback_list(callbacks: Any, **arguments: Any) -> Any:
    """Wraps callbacks in Keras's `CallbackList`, unless they are in one."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)
