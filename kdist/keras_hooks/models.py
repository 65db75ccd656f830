"""Hooks for models: `fit` and similar methods dispatch on the strategy that a model was created under."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kdist import context, handlers
from kdist.keras_hooks import trainer
from kdist.keras_hooks.wrapping import strategies, strategy_of, wrap

if TYPE_CHECKING:
    import keras
    import numpy as np
    from keras.src.trainers.trainer import Trainer as BaseTrainer

    from kdist.arrays.types import Function


MODEL_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def hook_models() -> None:
    import keras

    base = trainer.base_trainer()

    def remember(original: Function, self: BaseTrainer, /, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        strategy = context.current_strategy() if context.in_cross_replica_context() else None
        if strategy is not None:
            strategies[self] = strategy

    def compile(original: Function, self: BaseTrainer, /, *args: object, **kwargs: object) -> None:
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
        # Wrap the class that defines the method, because a `Trainer` need not be a `keras.Model`.
        owner = next(owner for owner in keras.Model.__mro__ if name in vars(owner))
        wrap(owner, name, functools.partial(_dispatch, name))


def _dispatch(name: str, original: Function, self: BaseTrainer, /, *args: object, **kwargs: object) -> object:
    strategy = strategy_of(self)
    if strategy is None:
        if name == "fit" and context.joined_strategy() is not None:
            warnings.warn(
                f"Model {getattr(self, 'name', type(self).__name__)} was created outside the scope of the strategy, so "
                "each worker trains its own model. Create it inside `with strategy.scope():`.",
                stacklevel=3,
            )
        handlers.call(
            "refuse_distributed", self, name, *args[:1], *[v for k, v in kwargs.items() if k == "x"]
        )
        # The strategy in scope must not affect models that belong to no strategy.
        outer = context.current_strategy()
        with contextlib.nullcontext() if outer is None else outer.runtime.suspended():
            return original(self, *args, **kwargs)
    with without_distribution():
        return handlers.call(name, strategy, self, *args, **kwargs)


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """A context without an active `keras.distribution`, because the strategy already implements it."""
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


# Whether kdist created PyTorch's process group. If it did, plain models must not use it.
_owns_process_group = False


def claim_process_group(is_ours: bool) -> None:
    """Records whether kdist, rather than the user, created PyTorch's process group."""
    global _owns_process_group
    _owns_process_group = is_ours


def hook_torch_distribution() -> None:
    """Prevents Keras 3.16 from using PyTorch's process group for models that must not use it.

    If a process group exists, Keras 3.16 wraps every model in DDP and sums metrics over all processes. kdist
    already does both for a strategy's models. Other models stay local, because a single worker can call them.
    They are only distributed if the user created the process group or set a `keras.distribution`.
    """
    import keras

    def is_local(model: keras.Model) -> bool:
        ours = _owns_process_group and keras.distribution.distribution() is None
        return ours or strategy_of(model) is not None

    def own_metrics(
        owner: type[keras.Model], original: Callable[..., Mapping[str, object]], self: keras.Model
    ) -> Mapping[str, object]:
        return super(owner, self).get_metrics_result() if is_local(self) else original(self)

    def initialize(original: Function, self: keras.Model) -> None:
        if not is_local(self):
            original(self)

    for owner in keras.Model.__mro__:
        if owner.__module__ == "keras.src.backend.torch.trainer":
            if "get_metrics_result" in vars(owner):
                wrap(owner, "get_metrics_result", functools.partial(own_metrics, owner))
            if "_initialize_ddp" in vars(owner):
                wrap(owner, "_initialize_ddp", initialize)


def build(model: keras.Model, steps_build: bool, **first: object) -> None:
    """Creates the variables of the model, metrics, loss and optimizer from the shapes of one global batch.

    Args:
        model: A compiled model.
        steps_build: Whether the backend's steps can also create variables. If a model has a custom step,
            but its `call` is missing or does not fit this data, the step creates the variables.
        **first: `data_batch`, or `iterator`, a Keras iterator that begins with this batch.
    """
    _unless_steps_build(model, steps_build, lambda: model._symbolic_build(**first))


def _unless_steps_build(model: keras.Model, steps_build: bool, function: Callable[[], object]) -> None:
    import keras

    def is_own(*methods: str) -> bool:
        return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in methods)

    may_wait = steps_build and is_own("train_step", "test_step", "predict_step")
    if may_wait and not is_own("call"):
        return
    try:
        function()
    except Exception:
        # `call` may not fit this data although the step does. A step that also fails raises its own error.
        if not may_wait:
            raise


def build_layers(model: keras.Model, steps_build: bool, data_batch: object) -> None:
    """Creates only the variables of the layers, for a model that is not compiled; see `build`."""
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


def layer_paths(model: keras.Model) -> list[str]:
    """Returns the paths of a model's layers, which identify the layouts of their outputs."""
    return [layer.path for layer in model._flatten_layers() if getattr(layer, "path", None)]


def stateful_recurrent_layers(model: keras.Model) -> list[str]:
    """Returns the paths of recurrent layers whose state for the next batch has one row per row of this batch."""
    import keras

    layers = model._flatten_layers()
    return [layer.path for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns all Keras variables of a model, including seeds, metrics and optimizer, in a fixed order."""
    optimizer = getattr(model, "optimizer", None)
    parts = [
        *model.variables,
        *(model.metrics_variables if getattr(model, "compiled", False) else ()),
        *getattr(optimizer, "variables", ()),
        *model.non_trainable_variables,
    ]
    return list({id(variable): variable for variable in parts}.values())


def joined_ragged(parts: Sequence[object]) -> np.ndarray:
    """Joins outputs of batches that differ in more than the number of rows, as Keras does on TensorFlow."""
    from keras.src.backend.tensorflow import trainer as tensorflow_trainer

    return tensorflow_trainer.convert_to_np_if_not_ragged(tensorflow_trainer.potentially_ragged_concat(parts))


def reads_logs_at_once(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns whether a callback list converts the logs of a step to numbers before it calls the callbacks.

    This makes it wait for the step. Lists that convert logs in a thread, and custom lists, return `False`.
    """
    import keras

    return type(callbacks) is keras.callbacks.CallbackList and not getattr(callbacks, "_async_train", False)


def callback_list(
    callbacks: keras.callbacks.CallbackList | Sequence[keras.callbacks.Callback] | None, **arguments: object
) -> keras.callbacks.CallbackList:
    """Wraps callbacks in Keras's `CallbackList`, unless they already are one."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)
