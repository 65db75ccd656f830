"""Hooks for optimizers: gradients are summed over the replicas first."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from kdist.context import has_strategy
from kdist.keras_hooks.own import is_own
from kdist.keras_hooks.variables import stateless_scope
from kdist.keras_hooks.wrapping import OWNER, RunningReplica, running_replica, temporarily, wrap

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Function, Structure
    from kdist.values import Tensor

    Taker: TypeAlias = Callable[[keras.Optimizer, list[Tensor | None], list[keras.Variable]], None]
    """Receives an optimizer, the gradients and their variables."""


# Keras's optimizers that update each element independently, so they can also update a shard of a variable.
_ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")


class _Taking(threading.local):
    taker: Taker | None = None
    owner: keras.Variable | None = None
    mark: Callable[[Tensor], Tensor] | None = None


_taking = _Taking()


def taking_gradients(taker: Taker) -> AbstractContextManager[None]:
    """Returns a context in which optimizers in this thread pass gradients to a function instead of applying them."""
    return temporarily(_taking, taker=taker)


def marking_gradients(mark: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Returns a context in which optimizers in this thread use `mark(gradient)` instead of each gradient."""
    return temporarily(_taking, mark=mark)


def owner_in_creation() -> keras.Variable | None:
    """Returns the variable for which an optimizer in this thread is creating a variable, or `None`."""
    return _taking.owner


def decays(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    return bool(optimizer._use_weight_decay(variable))


def clipped(optimizer: keras.Optimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients after an optimizer has removed the scale of the loss and has clipped them."""
    if (scale := optimizer.loss_scale_factor) is not None:
        gradients = [gradient / scale for gradient in gradients]
    return list(optimizer._clip_gradients(list(gradients)))


def hook_optimizers() -> None:
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    def apply(
        original: Function,
        self: keras.Optimizer,
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> object:
        if _taking.taker is not None:
            variables = trainable_variables or self._trainable_variables
            if all(gradient is None for gradient in grads):
                return (
                    self._filter_empty_gradients(grads, variables) if grads else None
                )  # raises Keras's error
            return _taking.taker(self, list(grads), list(variables))
        grads = _marked(grads)
        replica = running_replica()
        if replica is None or replica.applying is not None:
            return original(self, grads, trainable_variables)
        replica.applying = self  # the optimizer inside a LossScaleOptimizer must not sum again
        try:
            variables = trainable_variables or self._trainable_variables
            grads = _sum_gradients(replica, list(grads), list(variables))

            def apply_sums() -> object:
                if not self.built and replica.divides_variables:
                    build_optimizer(self, list(variables))
                    replica.take_variables(self.variables)
                return original(self, grads, trainable_variables)

            return replica.apply_gradients(apply_sums)
        finally:
            replica.end_apply()

    def stateless_apply(
        original: Callable[..., Structure],
        self: keras.Optimizer,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        *args: Any,
        **kwargs: Any,
    ) -> Structure:
        return original(self, optimizer_variables, _marked(grads), *args, **kwargs)

    def scale_loss(original: Callable[..., Tensor], self: keras.Optimizer, loss: Tensor) -> Tensor:
        scaled = original(self, loss)
        replica = running_replica()
        return scaled if replica is None or scaled is loss else replica.weight_loss(scaled, self)

    def from_reference(
        original: Callable[..., keras.Variable],
        self: keras.Optimizer,
        reference_variable: keras.Variable,
        *args: object,
        **kwargs: object,
    ) -> keras.Variable:
        with temporarily(_taking, owner=reference_variable):
            variable = original(self, reference_variable, *args, **kwargs)
        if has_strategy():
            setattr(variable, OWNER, getattr(reference_variable, "path", None))
        return variable

    wrap(BaseOptimizer, "add_variable_from_reference", from_reference)
    wrap(BaseOptimizer, "scale_loss", scale_loss)
    wrap(LossScaleOptimizer, "scale_loss", scale_loss)
    wrap(BaseOptimizer, "apply", apply)
    wrap(LossScaleOptimizer, "apply", apply)
    # It checks whether the gradients are finite before it calls another optimizer.
    wrap(LossScaleOptimizer, "stateless_apply", stateless_apply)


def is_elementwise(optimizer: keras.Optimizer) -> bool:
    """Returns whether an optimizer updates each element independently; `False` for custom optimizers."""
    return type(optimizer).__name__ in _ELEMENTWISE and not is_own(optimizer)


def only_accumulates(optimizer: object, variables: Sequence[keras.Variable]) -> bool:
    """Returns whether an optimizer of Keras only adds the gradients of most batches to its accumulators."""
    import keras

    return (
        isinstance(optimizer, keras.Optimizer)
        and not is_own(optimizer)
        # A `LossScaleOptimizer` first checks whether all gradients are finite.
        and not hasattr(optimizer, "inner_optimizer")
        and (optimizer.gradient_accumulation_steps or 1) > 1
        and not any(getattr(variable, "overwrite_with_gradient", False) for variable in variables)
    )


def accumulators(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the variables in which an optimizer accumulates gradients, in the order of the trained variables."""
    return list(optimizer._accumulated_gradients)


def learning_rate(optimizer: keras.Optimizer) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Returns the learning rate as the constructor of the optimizer takes it: a number or a schedule."""
    import keras

    rate = optimizer._learning_rate
    return float(optimizer.learning_rate) if isinstance(rate, keras.Variable) else rate


@contextlib.contextmanager
def keeping_learning_rates(optimizer: keras.Optimizer | None) -> Iterator[None]:
    """A context that undoes changes of learning rates."""
    import keras

    found, rates = [optimizer], []
    while found:
        one = found.pop()
        found += [*getattr(one, "optimizers", ()), *filter(None, [getattr(one, "inner_optimizer", None)])]
        if isinstance(rate := getattr(one, "_learning_rate", None), keras.Variable):
            rates.append((rate, keras.ops.convert_to_numpy(rate)))
    yield
    for variable, value in rates:
        variable.assign(value)


def count_step(optimizer: keras.Optimizer, resets_all: bool) -> None:
    """Counts a step of an optimizer without gradients. As in Keras, moving averages change nevertheless.

    If `resets_all` is true, an update discards the accumulated gradients of all variables.
    """
    every = optimizer.gradient_accumulation_steps
    if resets_all and every and (int(optimizer._iterations) + 1) % every == 0:
        optimizer._backend_reset_gradient_accumulators()
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
        every = optimizer.ema_overwrite_frequency
        if every and (int(optimizer.iterations) + 1) % every == 0:
            optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables)
    optimizer._iterations.assign_add(1)


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the variables that a built optimizer trains, in the order of its slots."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return list(getattr(optimizer, "_trainable_variables", ()))


def step_variable(optimizer: keras.Optimizer) -> keras.Variable:
    """Returns the variable that counts the batches of an optimizer.

    The property `iterations` is a constant if gradients are accumulated. The variable of a wrapper such as
    `LossScaleOptimizer` stays 0.
    """
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer._iterations


def build_optimizer(
    optimizer: keras.Optimizer, variables: list[keras.Variable], undecayed: Sequence[keras.Variable] = ()
) -> None:
    """Builds an optimizer in the same way as its `apply`."""
    from keras.src.backend import name_scope

    if undecayed:
        optimizer.exclude_from_weight_decay(var_list=list(undecayed))
    with name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)
    optimizer.built = True


def _marked(grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    mark = _taking.mark
    return grads if mark is None else [None if gradient is None else mark(gradient) for gradient in grads]


def _sum_gradients(
    replica: RunningReplica, grads: list[Any], variables: list[keras.Variable]
) -> list[Tensor | None]:
    present = [i for i, gradient in enumerate(grads) if gradient is not None]
    sums = replica.sum_gradients([grads[i] for i in present], [variables[i] for i in present])
    for i, total in zip(present, sums, strict=True):
        grads[i] = total
    return grads


def hook_tensorflow_optimizers(in_native_scope: Callable[[], bool]) -> None:
    """Makes Keras's optimizers for TensorFlow behave as on other backends; the backend calls this once.

    Args:
        in_native_scope: Returns whether `tf.distribute` has a strategy in scope. Unless this strategy runs
            kdist's replicas, it is the user's, and Keras's original methods apply.
    """
    import keras
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer as base
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as loss_scale

    def is_foreign() -> bool:
        return not has_strategy() and in_native_scope()

    def neutral(
        name: str, original: Function, self: keras.Optimizer, /, *args: object, **kwargs: object
    ) -> object:
        # A scope may define a method of this name, for variables that are stored elsewhere.
        own = getattr(stateless_scope(), name, None)
        if own is not None:
            return own(self, *args, **kwargs)
        chosen = original if is_foreign() else getattr(base, name)
        return chosen(self, *args, **kwargs)

    for name in (
        "_apply_weight_decay",
        "_backend_update_step",
        "_backend_increment_gradient_accumulators",
        "_backend_maybe_overwrite_model_variables",  # of Keras 3.16
        "_overwrite_model_variables_with_average_value",
        "add_variable_from_reference",
    ):
        if hasattr(TFOptimizer, name):
            wrap(TFOptimizer, name, functools.partial(neutral, name))

    def var_key(original: Function, self: keras.Optimizer, variable: keras.Variable) -> object:
        # In a scope, `value` can be a replica's copy or a shard, so use the stored variable.
        is_hidden = stateless_scope() is not None and getattr(variable, "_value", None) is not None
        return original(self, variable._value if is_hidden else variable)

    def tf_apply(
        original: Function,
        self: keras.Optimizer,
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> object:
        chosen = original if is_foreign() else loss_scale._common_apply
        return chosen(self, grads, trainable_variables)

    def swap(
        name: str, original: Function, self: keras.callbacks.SwapEMAWeights, optimizer: keras.Optimizer
    ) -> None:
        (original if is_foreign() else getattr(type(self), name))(self, optimizer)

    for name in ("swap_variables", "finalize_ema_values"):
        wrap(keras.callbacks.SwapEMAWeights, f"_tf_{name}", functools.partial(swap, f"_backend_{name}"))
    wrap(TFOptimizer, "_var_key", var_key)
    wrap(loss_scale, "_tf_apply", tf_apply)
