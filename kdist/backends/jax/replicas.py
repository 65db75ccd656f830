"""One replica of a user function on JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax.extend.core import get_opaque_trace_state

from kdist.backends.jax.collectives import Collectives, concatenated
from kdist.backends.replica import Replica, equal_shares
from kdist.context import cross_replica
from kdist.values import DistributedValues

if TYPE_CHECKING:
    from kdist.arrays.types import Function, Structure
    from kdist.context import StrategyLike


class JaxReplica(Replica):
    """A replica that runs a user function."""

    def __init__(self, strategy: StrategyLike, collectives: Collectives) -> None:
        number = strategy.num_replicas_in_sync
        super().__init__(
            strategy,
            collectives.replica_id,
            number,
            equal_shares(number)[0],
            collectives.local_index,
            is_model_step=False,
        )
        self._collectives = collectives
        self._trace = get_opaque_trace_state()
        self.same: list[jax.Array] = []
        """The arrays that `merge_call` returned to all local replicas."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, or all local devices if one program runs on several."""
        names = self.strategy.runtime.devices
        return (names[self.local_index],) if isinstance(self.local_index, int) else tuple(names)

    def concatenate(self, tensors: Sequence[Any]) -> Any:
        return concatenated(tensors)

    def all_reduce_sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        return self._collectives.sum(tensors)

    def all_reduce_with_gradient(self, tensor: jax.Array) -> jax.Array:
        """Sums a tensor over all replicas; its gradient is the sum of the replicas' gradients."""
        if get_opaque_trace_state() == self._trace:  # nothing computes a gradient here
            return self._collectives.sum([tensor])[0]

        @jax.custom_vjp
        def total(x: jax.Array) -> jax.Array:
            return self._collectives.sum([x])[0]

        total.defvjp(lambda x: (total(x), None), lambda _, gradient: (total(gradient),))
        return total(tensor)

    def gather_tensor(self, tensor: jax.Array, axis: int) -> jax.Array:
        """Concatenates the tensors of all replicas; the gradient includes the uses in all replicas."""
        self.note(f"all_gather(axis={axis})", [])
        numpy = jax.numpy
        number = tensor.shape[axis]

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return self._collectives.gather(x)[0]

        def backward(first: int | jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
            total = self._collectives.sum([gradient])[0]
            return (jax.lax.dynamic_slice_in_dim(total, first, number),)

        gather.defvjp(self._collectives.gather, backward)
        return numpy.moveaxis(gather(numpy.moveaxis(tensor, axis, 0)), 0, axis)

    def new_slots(self, arrays: Sequence[np.ndarray]) -> list[keras.Variable]:
        """Creates on-read variables, of which each replica has a component."""
        options: Any = {"trainable": False, "synchronization": "on_read"}
        return [
            keras.Variable(lambda *_, a=a, **__: jax.numpy.asarray(a), a.shape, a.dtype.name, **options)
            for a in arrays
        ]

    def own_slots(self, slots: Sequence[keras.Variable]) -> Sequence[keras.Variable]:
        return slots

    def merge_call(
        self, merge_fn: Function, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        self.require_running("merge_call")

        scope: Any = self.scope
        scope.aggregate()

        def call(
            values: tuple[tuple[object, ...], dict[str, object]],
        ) -> tuple[Structure, list[tuple[keras.Variable, jax.Array]], list[bool]]:
            merged_args, merged_kwargs = values
            with scope.crossing() as written, cross_replica(self.strategy):
                result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
            return (
                result,
                written,
                [not isinstance(leaf, DistributedValues) for leaf in keras.tree.flatten(result)],
            )

        result, written, same = self._collectives.merge(call, (tuple(args), dict(kwargs or {})))
        self.same += [leaf for leaf, is_same in zip(keras.tree.flatten(result), same, strict=True) if is_same]
        with scope.crossing():  # the function may have run in another replica
            for variable, value in written:
                variable.assign(value)
        return result

    def for_all(self, value: jax.Array) -> jax.Array:
        """Moves a value to the first device for cross-replica computation, unless it is traced."""
        runtime: Any = self.strategy.runtime
        first = runtime.holder
        return value if isinstance(value, jax.core.Tracer) else jax.device_put(value, first)
