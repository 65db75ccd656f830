"""Losses over the rows of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kdist.keras_hooks.scalars import of_all_rows
from kdist.keras_hooks.variables import stateless_scope
from kdist.keras_hooks.wrapping import RunningReplica, running_model_replica, running_replica, wrap

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Function
    from kdist.values import Tensor


def hook_losses() -> None:
    from keras import ops
    from keras.src.losses import loss as losses

    def reduce_values(
        original: Callable[..., Tensor],
        values: Tensor,
        sample_weight: Tensor | None = None,
        reduction: str = "sum_over_batch_size",
    ) -> Tensor:
        replica = running_model_replica()
        if replica is None or len(values.shape) == 0:
            return original(values, sample_weight, reduction)
        return _reduce_rows(replica, original, values, sample_weight, reduction)

    def apply_mask(
        original: Callable[..., Tensor],
        sample_weight: Tensor | None,
        mask: Tensor | None,
        dtype: str,
        reduction: str | None,
    ) -> Tensor:
        replica = running_model_replica()
        if replica is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return original(sample_weight, mask, dtype, reduction)
        # The factor must count all replicas. With reduction="sum", Keras only multiplies the weights by the mask.
        # On PyTorch, it does so in place, and metrics use the product.
        scaled = ops.cast(mask, dtype) * _total_over_valid(replica, mask, dtype)
        return original(sample_weight, scaled, dtype, "sum")

    def reduce_weighted_values(
        original: Callable[..., Tensor],
        values: Tensor,
        sample_weight: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> Tensor:
        replica = running_model_replica()
        is_plain = sample_weight is None and mask is None
        if replica is None or is_plain or len(values.shape) > 0:
            return original(values, sample_weight, mask, reduction, dtype)
        # Keras multiplies a scalar loss by the mean of weights and mask. The mean must be over all rows.
        values = ops.convert_to_tensor(values, dtype)
        factor = original(ops.ones_like(values), sample_weight, mask, reduction, dtype)
        # On PyTorch, Keras reduces several float64 values to float32, but returns a single one unchanged.
        return values * replica.mean_over_rows([ops.cast(factor, values.dtype)])[0]

    def scaled(original: Callable[..., Tensor], value: Tensor, *, up: bool) -> Tensor:
        replica = running_replica()
        if replica is None or replica.is_model_step:
            # A model's step averages over the replicas, so the loss must not be scaled for a sum.
            return original(value) if replica is None else value
        # In a function of the user, gradients are summed over the replicas. Therefore the loss is divided by
        # the number of replicas, as in Keras on TensorFlow.
        number = replica.num_replicas_in_sync
        return value * number if up else value / number

    wrap(losses, "reduce_values", reduce_values)
    wrap(losses, "apply_mask", apply_mask)
    wrap(losses, "reduce_weighted_values", reduce_weighted_values)
    wrap(losses, "scale_loss_for_distribution", functools.partial(scaled, up=False))
    wrap(losses, "unscale_loss_for_distribution", functools.partial(scaled, up=True))


def _reduce_rows(
    replica: RunningReplica,
    original: Callable[..., Tensor],
    values: Tensor,
    sample_weight: Tensor | None,
    reduction: str,
) -> Tensor:
    from keras import ops

    if reduction in (None, "none"):
        # Keras differentiates the sum of this vector, but its values must stay per row.
        scaled = of_all_rows(replica, values)
        return scaled + ops.stop_gradient(values - scaled)
    if reduction == "sum":
        return of_all_rows(replica, original(values, None, "sum"))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        counts = replica.scalar(replica.rows.counts, values.dtype)
        local_weight = ops.cast(ops.sum(sample_weight), values.dtype) * counts
        (weight,) = replica.all_reduce_packed([local_weight])
        return ops.divide_no_nan(of_all_rows(replica, original(values, None, "sum")), weight)
    return original(values, sample_weight, reduction)


def _total_over_valid(replica: RunningReplica, mask: Tensor, dtype: str) -> Tensor:
    from keras import ops

    counts = replica.scalar(replica.rows.counts, dtype)
    valid = ops.sum(ops.cast(mask, dtype))
    total = ops.sum(ops.ones_like(mask, dtype=dtype))
    total, valid = replica.all_reduce_packed([total * counts, valid * counts])
    return ops.divide_no_nan(total, valid)


def forget_layer_losses(model: keras.Model) -> None:
    """Makes the layers of a model forget the losses that they added in earlier calls of `stateless_call`.

    Keras identifies the owner of a loss by its address. After a trace, another layer's loss can reuse the
    address, and Keras drops it. This happens in about 1% of traces, but not on all workers. Their programs
    then differ, and they wait for each other forever.
    """
    for layer in model._flatten_layers():
        layer._loss_ids.clear()


def hook_layer_losses() -> None:
    import keras

    def in_scope(original: Function, self: keras.Layer, /, *args: object, **kwargs: object) -> object:
        known = getattr(stateless_scope(), "loss_ids", None)
        if known is not None:
            # A reference to the layer prevents reuse of its address. `__setattr__` would track the set.
            vars(self)["_loss_ids"] = known.setdefault(id(self), (self, set()))[1]
        return original(self, *args, **kwargs)

    for name in ("add_loss", "_clear_losses", "_get_own_losses"):
        wrap(keras.Layer, name, in_scope)
