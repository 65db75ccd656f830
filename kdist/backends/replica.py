"""One replica's view of a training step, for the backends that run replicas one by one.

TensorFlow and PyTorch run the user's step once per replica, on the rows of this replica. Two classes make the
result equal to one device with all rows:

- `RowShare` contains the weight of a replica's rows.
- `ReplicaScope` records which variables the step writes, and aggregates them over the replicas in one packed
  collective; see `aggregation.py`.

A replica computes its loss as if the batch contained only its rows. The global loss is the mean of these
losses, weighted by `share`. Therefore, a custom loss that returns a scalar mean, a regularizer and a per-row
mean need no correction. `keras_hooks` corrects the others.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from kdist.arrays.splitting import have_all_rows
from kdist.arrays.structures import joined
from kdist.backends import debugging, low_rank, messages
from kdist.context import ReplicaContext, StrategyLike, cross_replica
from kdist.values import ReduceOp, component

WIDE = ("float32", "float64")
"""The dtypes of gradients that can be compressed to 16 bits."""

if TYPE_CHECKING:
    import numpy as np

    from kdist.arrays.types import Function, R, Scalar, T, Tensor, TensorT
    from kdist.backends.kept_gradients import KeptInReplicas


@dataclass(frozen=True)
class RowShare:
    """The weights of one replica's rows in a step. The values can be numbers or backend scalars.

    If a batch has fewer rows than replicas, every replica gets the whole batch. Each of R replicas then has a
    share of 1/R, and only the sums of replica 0 count.

    Args:
        share: The weight of this replica in a mean over all rows. The shares of all replicas add up to 1.
        counts: 1 if this replica's sums count in a sum over all rows, 0 if another replica has the same rows.
        scalar_weight: The weight of a scalar mean over this replica's rows in a running sum.
    """

    share: Any
    counts: Any
    scalar_weight: Any


def equal_shares(num_replicas: int) -> list[RowShare]:
    """Returns equal shares for replicas that run a user's function."""
    return [RowShare(1.0 / num_replicas, 1.0, 1.0)] * num_replicas


def shares_of(split: Sequence[tuple[int, int]]) -> list[RowShare]:
    """Returns the shares of all replicas in a model's step, given their rows from `split_rows`."""
    if have_all_rows(split):
        return [RowShare(1.0 / len(split), float(i == 0), 1.0) for i in range(len(split))]
    num_rows = split[-1][1]
    return [RowShare(share := (stop - start) / num_rows, 1.0, share) for start, stop in split]


class Replica(ReplicaContext):
    """A replica while it runs one step, with its share, its variables and its collectives.

    Args:
        replica_id: The index over all workers; a backend scalar if one program runs on all devices.
        is_model_step: Whether the replica runs the step of a model, whose loss covers all rows. If it runs a
            user's function instead, kdist does not weight the losses and sums the gradients.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        replica_id: Any,
        num_replicas: int,
        rows: RowShare,
        local_index: int = 0,
        is_model_step: bool = True,
    ) -> None:
        super().__init__(strategy, replica_id)
        self.is_model_step = is_model_step
        self.rows = rows
        self.local_index = local_index
        self.scope: Any = None  # the replica's `ReplicaScope`
        self.global_values: dict[int, object] = {}
        self.scaling: dict[keras.Optimizer, bool] = {}  # optimizers with a scaled loss; `False` once applied
        self.applying: keras.Optimizer | None = None  # the optimizer whose gradients are applied
        self.log: list[tuple[str, object, str]] = []
        self.kept_gradients: KeptInReplicas | None = None
        self._num_replicas = num_replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one name."""
        return (self.strategy.runtime.devices[self.local_index],)

    def note(self, collective: str, tensors: Sequence[Tensor]) -> None:
        """With `KDIST_DEBUG=1`, records a collective of the function and the line that calls it.

        The workers compare the collectives after the function was traced, or immediately if it is not traced.
        """
        if debugging.is_on():
            self.log.append((collective, debugging.signature(tensors), messages.call_site()))

    def reduce_tensor(self, op: ReduceOp, tensor: TensorT) -> TensorT:
        self.note("all_reduce", [tensor])
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)):
            total = self.all_reduce_with_gradient(tensor)
        else:
            # `all_reduce_sum` may return one tensor to all replicas, which `run` would merge to one value.
            (total,) = self.all_reduce_packed([tensor])
        return total if op is ReduceOp.SUM else divide(total, self.num_replicas_in_sync)

    @property
    def num_replicas_in_sync(self) -> int:
        return self._num_replicas

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[TensorT]) -> list[TensorT]:
        """Sums each tensor over all replicas. Not differentiable. All replicas must call it."""

    @abstractmethod
    def gather_tensor(self, tensor: TensorT, axis: int) -> TensorT:
        """Concatenates the tensors of all replicas along an axis, differentiably. Gradients are summed."""

    def call(self, fn: Callable[..., R], args: tuple[object, ...], kwargs: Mapping[str, object]) -> R:
        """Calls a user's function with this replica's components of the arguments, and aggregates its writes."""
        own_args, own_kwargs = component((args, kwargs), self.local_index)
        result = fn(*own_args, **own_kwargs)
        self.scope.aggregate()
        return result

    def merge_call(
        self, merge_fn: Function, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Calls a function once for all replicas of this worker; see `kdist.ReplicaContext.merge_call`."""
        self.require_running("merge_call")
        self.scope.aggregate()

        def merge(values: Sequence[tuple[tuple[object, ...], dict[str, object]]]) -> object:
            joined_args, joined_kwargs = joined(values)
            with cross_replica(self.strategy):
                call = functools.partial(merge_fn, self.strategy, *joined_args, **joined_kwargs)
                return self.scope.change_real_variables(call)

        result = self.call_once("merge_call", (tuple(args), dict(kwargs or {})), merge)
        return component(result, self.local_index)

    def call_once(self, what: str, value: T, merge: Callable[[Sequence[T]], R]) -> R:
        """Calls a function once with the values of all local replicas, for `merge_call`. Returns its result in each."""
        raise NotImplementedError

    def all_reduce_packed(
        self, tensors: Sequence[TensorT], weight: Scalar | None = None, dtype: str | None = None
    ) -> list[TensorT]:
        """Sums each tensor, times `weight` if given, over all replicas, with one collective per dtype.

        `dtype` is a 16-bit dtype in which wider floating-point numbers travel, or `None`.
        """
        if self._num_replicas == 1:  # with a weight of 1; packing would copy all gradients
            return list(tensors)
        if weight is not None:
            tensors = [tensor * self.scalar(weight, tensor.dtype) for tensor in tensors]
        if dtype is None:
            return packed(self.all_reduce_sum, tensors, self.concatenate)
        return packed(lambda flats: self._sum_compressed(flats, dtype), tensors, self.concatenate)

    def concatenate(self, tensors: Sequence[TensorT]) -> TensorT:
        """Concatenates flat tensors of one dtype."""
        whole: TensorT = keras.ops.concatenate(list(tensors))
        return whole

    def _sum_compressed(self, flats: Sequence[Any], compression: str) -> list[Any]:
        dtypes = [keras.backend.standardize_dtype(flat.dtype) for flat in flats]
        wide = [dtype in WIDE for dtype in dtypes]
        sent = [
            keras.ops.cast(flat / self.compression_divisor, compression) if is_wide else flat
            for flat, is_wide in zip(flats, wide, strict=True)
        ]
        return [
            keras.ops.cast(total, dtype) * self.compression_divisor if is_wide else total
            for total, dtype, is_wide in zip(self.all_reduce_sum(sent), dtypes, wide, strict=True)
        ]

    @property
    def compression_divisor(self) -> int:
        """The number by which gradients are divided before a cast, so that their sum fits into float16.

        In a model's step, it is 1, because the weighted gradients already add up to a mean.
        """
        return 1 if self.is_model_step else self.num_replicas_in_sync

    @abstractmethod
    def all_reduce_with_gradient(self, tensor: TensorT) -> TensorT:
        """Sums a tensor over all replicas, differentiably.

        The global loss is the mean of the replicas' losses weighted by `share`. Gradients are weighted again
        before an optimizer sums them. So replica i propagates the sum over all replicas j of `share_j /
        share_i` times the gradient at j. These shares are the `gradient_weight` of each replica.
        """

    def moments(
        self, x: TensorT, axes: Sequence[int], keepdims: bool = False, mask: TensorT | None = None
    ) -> tuple[TensorT, TensorT]:
        """Returns the mean and variance over the rows of all replicas, for synchronized BatchNormalization.

        With a mask of the shape of `x`, they only cover the values where it is true. Uses two passes, because the
        difference E[x²] - E[x]² loses precision if the mean is large.
        """
        ops = keras.ops
        axes = list(axes)
        counts = self.scalar(self.rows.counts, x.dtype)

        def total(values: TensorT) -> Any:
            values = values if mask is None else ops.where(mask, values, 0)
            return ops.sum(values, axis=axes, keepdims=True) * counts

        (number,) = self.all_reduce_packed([total(ops.ones_like(x))])
        if mask is not None:
            number += keras.config.epsilon()  # as in Keras, because the mask may hide all values
        mean = self.all_reduce_with_gradient(total(x)) / number
        variance = self.all_reduce_with_gradient(total(ops.square(x - mean))) / number
        if not keepdims:
            mean, variance = ops.squeeze(mean, axes), ops.squeeze(variance, axes)
        return mean, variance

    @property
    def loss_is_weighted(self) -> bool:
        """Whether gradients come from a loss that `weight_loss` has weighted."""
        return any(self.scaling.values()) if self.applying is None else bool(self._scaled_for_applying())

    def _scaled_for_applying(self) -> list[keras.Optimizer]:
        # `MultiOptimizer` scales the loss for its optimizers.
        return [one for one in self.scaling if self.applying in (one, *getattr(one, "optimizers", ()))]

    def end_apply(self) -> None:
        """Notes that an optimizer has been applied: later gradients come from other losses."""
        self.scaling.update(dict.fromkeys(self._scaled_for_applying(), False))
        self.applying = None

    @property
    def gradient_weight(self) -> Scalar:
        """The factor for gradients before they are summed over the replicas."""
        return self.rows.share if self.is_model_step and not self.loss_is_weighted else 1.0

    def scalar(self, number: Scalar, dtype: object) -> Tensor:
        """Returns a number, for example from a `RowShare`, as a tensor."""
        return keras.ops.cast(number, dtype)

    def weight_loss(self, loss: TensorT, optimizer: keras.Optimizer) -> TensorT:
        """Weights a loss that an optimizer scaled with this replica's share before its gradients are computed.

        Needed for loss scaling, so that float16 gradients overflow exactly when they would on one device.
        """
        if not self.is_model_step:
            return loss
        self.scaling[optimizer] = True
        return loss * self.scalar(self.rows.share, loss.dtype)

    def sum_gradients(
        self, gradients: Sequence[TensorT], variables: Sequence[keras.Variable]
    ) -> list[TensorT]:
        """Returns the gradients of the global loss for some variables."""
        # During tracing, TensorFlow may not know the shape of a gradient, which equals the variable's shape.
        gradients = [
            keras.ops.reshape(keras.ops.convert_to_tensor(gradient), variable.shape)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        self.note("sum of gradients", gradients)
        if self.strategy.own_ops is not None:
            return self._sum_by_own(gradients, variables)
        weight = None if self.loss_is_weighted or not self.is_model_step else self.rows.share
        if self.kept_gradients is not None:
            return self._sum_kept(self.kept_gradients, gradients, variables, weight)
        return self._sum_compactly(gradients, variables, weight)

    def _sum_compactly(
        self,
        gradients: Sequence[TensorT],
        variables: Sequence[keras.Variable],
        weight: Scalar | None = None,
    ) -> list[TensorT]:
        """Sums the gradients over the replicas, compressed as the user chose."""
        runtime = self.strategy.runtime
        if runtime.low_rank is None:
            return self.all_reduce_packed(gradients, weight, runtime.compression)
        if weight is not None:
            gradients = [gradient * self.scalar(weight, gradient.dtype) for gradient in gradients]
        slots = [runtime.low_rank.slots_of(variable, self.new_slots) for variable in variables]
        own = [self.own_slots(each) for each in slots]
        values = [[keras.ops.convert_to_tensor(slot) for slot in each] for each in own]
        number = self.num_replicas_in_sync
        totals, values = low_rank.sums(gradients, values, number, self.all_reduce_packed)
        with self.scope.untracked():
            for each, news in zip(own, values, strict=True):
                for slot, new in zip(each, news, strict=True):
                    self.write_slot(slot, new)
        return totals

    def new_slots(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Returns variables that keep arrays between steps, for each local replica. PowerSGD needs them."""
        raise NotImplementedError

    def own_slots(self, slots: Sequence[Any]) -> Sequence[Any]:
        """Returns this replica's variables from the result of `new_slots`."""
        return slots[self.local_index] if slots else ()

    def write_slot(self, slot: Any, value: Tensor) -> None:
        """Sets a variable of `own_slots`."""
        slot.assign(value)

    def _sum_kept(
        self,
        kept: KeptInReplicas,
        gradients: Sequence[TensorT],
        variables: Sequence[keras.Variable],
        weight: Scalar | None,
    ) -> list[TensorT]:
        """Adds the gradients to kept ones. Returns the sums over the replicas if they are due, or else zeros."""
        positions = kept.positions(variables)
        if weight is not None:
            gradients = [gradient * self.scalar(weight, gradient.dtype) for gradient in gradients]
        sums = kept.add(self.local_index, positions, gradients)
        if not kept.is_due:
            return [keras.ops.zeros_like(gradient) for gradient in gradients]
        totals = self._sum_compactly(sums, variables)
        kept.clear(self.local_index, positions)
        return totals

    def _sum_by_own(self, gradients: Sequence[TensorT], variables: Sequence[keras.Variable]) -> list[TensorT]:
        """Sums with the user's `CrossDeviceOps`, as Keras's optimizers do with `tf.distribute`."""
        weighted = [g * self.scalar(self.gradient_weight, g.dtype) for g in gradients]

        def merge(strategy: Any, values: Sequence[object]) -> list[TensorT]:
            return strategy.extended.batch_reduce_to(ReduceOp.SUM, zip(values, variables, strict=True))

        return self.merge_call(merge, args=(weighted,))

    @property
    def divides_variables(self) -> bool:
        """Whether `take_variables` shards variables that an optimizer creates in a replica."""
        return False

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Shards new variables that have equal values on all replicas."""

    def apply_gradients(self, apply: Callable[[], object]) -> object:
        """Runs Keras's `optimizer.apply` on this replica's variables. All replicas compute equal updates."""
        with self.scope.untracked():
            return apply()

    def mean_over_rows(self, tensors: Sequence[TensorT]) -> list[TensorT]:
        """Returns means over all rows, given tensors that are means over the rows of each replica."""
        return self.all_reduce_packed(tensors, self.rows.share)


def divide(total: TensorT, number: int | Tensor) -> TensorT:
    """Divides a sum by the number of summands. Integers are rounded down, because their dtype stays."""
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(total.dtype)):
        return total / keras.ops.cast(number, total.dtype)
    return keras.ops.floor_divide(total, keras.ops.cast(number, total.dtype))


def packed(
    reduce: Callable[[Sequence[TensorT]], list[TensorT]],
    tensors: Sequence[TensorT],
    concatenate: Callable[[Sequence[TensorT]], TensorT],
) -> list[TensorT]:
    """Applies an elementwise reduction to many tensors, concatenated to one flat tensor per dtype.

    Because each collective adds latency, small models only scale with one collective for all gradients.
    """
    ops = keras.ops
    groups: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(keras.backend.standardize_dtype(tensor.dtype), []).append(i)
    flats = []
    for members in groups.values():
        parts = [ops.reshape(tensors[i], (-1,)) for i in members]
        flats.append(parts[0] if len(parts) == 1 else concatenate(parts))
    results: list[Any] = [None] * len(tensors)
    for flat, members in zip(reduce(flats), groups.values(), strict=True):
        start = 0
        for i in members:
            shape = tuple(tensors[i].shape)
            size = math.prod(shape)
            results[i] = ops.reshape(flat[start : start + size], shape)
            start += size
    return results
