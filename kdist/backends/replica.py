"""One replica's view of a training step, shared by the backends that run replicas one by one.

TensorFlow and PyTorch run the user's step once a replica, each on its own rows. Two things make the result
the one that a single device would give on all rows:

- a `RowShare` says how much a replica's rows count, and
- a `ReplicaScope` notes which variables the step writes, and aggregates them over the replicas in one packed
  collective; see `aggregation.py`.

The convention: a replica's loss is what the loss would be if its rows were all there are, and the global loss
is the mean of these, weighted by `share`. A custom loss that returns a scalar mean, a regulariser and a
per-row mean need no correction then; `keras_hooks` corrects the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kdist.arrays.splitting import have_all_rows
from kdist.backends import debugging
from kdist.context import ReplicaContext, StrategyLike
from kdist.values import ReduceOp


@dataclass(frozen=True)
class RowShare:
    """How much the rows of one replica count in a step. The values may be numbers or backend scalars.

    A batch with fewer rows than replicas is given whole to every replica: then each has `share` 1/R, and the
    sums of replica 0 alone count.

    Args:
        share: Weight of this replica in a mean over all rows; the shares of all replicas add up to 1.
        counts: 1 if this replica's sums count in a sum over all rows, 0 if another replica has the same rows.
        scalar_weight: Weight of a scalar, already a mean over this replica's rows, in a running sum.
    """

    share: Any
    counts: Any
    scalar_weight: Any


def equal_shares(num_replicas: int) -> list[RowShare]:
    """The shares of replicas that run a function of the user's, where each counts as much as any other."""
    return [RowShare(1.0 / num_replicas, 1.0, 1.0)] * num_replicas


def shares_of(split: Sequence[tuple[int, int]]) -> list[RowShare]:
    """The shares of all replicas in a step of a model's, for the rows that `split_rows` gives them."""
    if have_all_rows(split):
        return [RowShare(1.0 / len(split), float(i == 0), 1.0) for i in range(len(split))]
    num_rows = split[-1][1]
    return [RowShare(share := (stop - start) / num_rows, 1.0, share) for start, stop in split]


class Replica(ReplicaContext):
    """A replica while it runs one step: its share, its variables, and the sum over all replicas.

    Args:
        replica_id: Its index over all workers; a backend scalar where one program runs on all devices.
        is_model_step: Whether it runs a step of a model's, whose loss is to be that of all rows. In a function
            of the user's, losses and gradients are what the function makes of them, and gradients are summed.
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
        self.scope: Any = None  # its `ReplicaScope`
        self.global_values: dict[int, Any] = {}
        self.loss_is_weighted = False
        self.log: list[tuple[str, Any, str]] = []
        self._num_replicas = num_replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one name."""
        return (self.strategy.runtime.devices[self.local_index],)

    def note(self, collective: str, tensors: Sequence[Any]) -> None:
        """Keeps, under `KDIST_DEBUG=1`, which collectives the function has, and where.

        The workers compare them once the function was traced, or at once where it is not.
        """
        if debugging.is_on():
            self.log.append((collective, debugging.signature(tensors), debugging.call_site()))

    def reduce_tensor(self, op: ReduceOp, tensor: Any) -> Any:
        """Reduces one tensor over all replicas, differentiably where it is of floating point."""
        self.note("all_reduce", [tensor])
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)):
            total = self.all_reduce_with_gradient(tensor)
        else:
            # Packed, since `all_reduce_sum` may give all replicas the same tensor, which `run` would return as one.
            (total,) = self.all_reduce_packed([tensor])
        return total if op is ReduceOp.SUM else divide(total, self.num_replicas_in_sync)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over all workers."""
        return self._num_replicas

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums each tensor over all replicas. Not differentiable. All replicas must call it."""

    @abstractmethod
    def gather_tensor(self, tensor: Any, axis: int) -> Any:
        """Concatenates the tensors of all replicas along an axis, differentiably: gradients are summed."""

    @abstractmethod
    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function once for all replicas of this worker; see `kdist.ReplicaContext.merge_call`."""

    def all_reduce_packed(self, tensors: Sequence[Any], weight: Any = None) -> list[Any]:
        """Sums each tensor, times this replica's weight if it has one, over all replicas: one collective a dtype."""
        if weight is not None:
            tensors = [tensor * self.scalar(weight, tensor.dtype) for tensor in tensors]
        return packed(self.all_reduce_sum, tensors)

    @abstractmethod
    def all_reduce_with_gradient(self, tensor: Any) -> Any:
        """Sums a tensor over all replicas, differentiably.

        The global loss is the mean of the replicas' losses weighted by `share`, and gradients are weighted once
        more when an optimizer sums them. So the gradient that replica i passes on is the sum over all replicas j
        of `share_j / share_i` times the gradient that arrived at j (`gradient_weight` in place of `share`).
        """

    def moments(self, x: Any, axes: Sequence[int], keepdims: bool = False) -> tuple[Any, Any]:
        """Returns mean and variance over the rows of all replicas, for synchronized BatchNormalization.

        In two passes, since the difference E[x²] - E[x]² loses digits where the mean is large.
        """
        ops = keras.ops
        axes = list(axes)
        counts = self.scalar(self.rows.counts, x.dtype)
        number = ops.sum(ops.ones_like(x), axis=axes, keepdims=True) * counts
        (number,) = self.all_reduce_packed([number])
        mean = self.all_reduce_with_gradient(ops.sum(x, axis=axes, keepdims=True) * counts) / number
        squares = ops.sum(ops.square(x - mean), axis=axes, keepdims=True) * counts
        variance = self.all_reduce_with_gradient(squares) / number
        if not keepdims:
            mean, variance = ops.squeeze(mean, axes), ops.squeeze(variance, axes)
        return mean, variance

    @property
    def gradient_weight(self) -> Any:
        """What gradients are still to be multiplied with before they are summed over the replicas."""
        return self.rows.share if self.is_model_step and not self.loss_is_weighted else 1.0

    def scalar(self, number: Any, dtype: Any) -> Any:
        """Returns a number, such as a `RowShare`'s, as a tensor."""
        return keras.ops.cast(number, dtype)

    def weight_loss(self, loss: Any) -> Any:
        """Weights a loss with this replica's share before its gradients are computed instead of after.

        For loss scaling: float16 gradients must be as large as on one device, to overflow where they would.
        """
        if not self.is_model_step:
            return loss
        self.loss_is_weighted = True
        return loss * self.scalar(self.rows.share, loss.dtype)

    def sum_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the global loss, for some variables."""
        # TensorFlow may not know the shape of a gradient while tracing; it is the variable's.
        gradients = [
            keras.ops.reshape(keras.ops.convert_to_tensor(gradient), variable.shape)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        self.note("sum of gradients", gradients)
        if self.strategy.own_ops is not None:
            return self._sum_by_own(gradients, variables)
        if self.loss_is_weighted or not self.is_model_step:
            return self.all_reduce_packed(gradients)
        return self.mean_over_rows(gradients)

    def _sum_by_own(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums by the user's own class, as Keras's optimizers do under `tf.distribute`."""
        weight = self.gradient_weight
        weighted = [g * self.scalar(weight, g.dtype) for g in gradients]

        def merge(strategy: Any, values: Sequence[Any]) -> list[Any]:
            return strategy.extended.batch_reduce_to(ReduceOp.SUM, zip(values, variables, strict=True))

        return self.merge_call(merge, args=(weighted,))

    @property
    def divides_variables(self) -> bool:
        """Whether `take_variables` divides variables that an optimizer makes in a replica."""
        return False

    def take_variables(self, variables: Sequence[Any]) -> None:
        """Divides new variables, of equal values on all replicas."""
        return

    def apply_gradients(self, apply: Callable[[], Any]) -> Any:
        """Runs Keras's `optimizer.apply` on what is this replica's own; all replicas do the same sums."""
        assert self.scope is not None
        with self.scope.untracked():
            return apply()

    def mean_over_rows(self, tensors: Sequence[Any]) -> list[Any]:
        """Means over all rows, of tensors that are means over the rows of each replica."""
        return self.all_reduce_packed(tensors, self.rows.share)


def divide(total: Any, number: Any) -> Any:
    """Divides a sum by how many were summed; integers are rounded down, as their dtype stays."""
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(total.dtype)):
        return total / keras.ops.cast(number, total.dtype)
    return keras.ops.floor_divide(total, keras.ops.cast(number, total.dtype))


def packed(reduce: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Applies an elementwise reduction to many tensors as one flat tensor a dtype.

    One collective for all gradients is what makes small models scale: each has a latency of its own.
    """
    ops = keras.ops
    groups: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(keras.backend.standardize_dtype(tensor.dtype), []).append(i)
    flats = []
    for members in groups.values():
        parts = [ops.reshape(tensors[i], (-1,)) for i in members]
        flats.append(parts[0] if len(parts) == 1 else ops.concatenate(parts))
    results: list[Any] = [None] * len(tensors)
    for flat, members in zip(reduce(flats), groups.values(), strict=True):
        start = 0
        for i in members:
            shape = tuple(tensors[i].shape)
            size = 1
            for dim in shape:
                size *= dim
            results[i] = ops.reshape(flat[start : start + size], shape)
            start += size
    return results
