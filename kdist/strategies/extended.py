"""`Strategy.extended`: methods for TensorFlow's libraries and for users who write their own libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kdist.context import StrategyLike
from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues, PerReplica, ReduceOp

if TYPE_CHECKING:
    import keras


class StrategyExtended:
    """Methods of a strategy for libraries and advanced users, with the names of `tf.distribute`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended

    Args:
        strategy: The strategy that this object extends.
    """

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this worker that run replicas."""
        return tuple(self._strategy.runtime.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this worker that hold variables."""
        return self._strategy.runtime.topology.parameter_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all shapes must be static. Always `False`."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker is the chief, which writes checkpoints and other shared files."""
        return self._strategy.runtime.worker_index == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker is the chief, which writes summaries."""
        return self.should_checkpoint

    def non_slot_devices(self, var_list: object) -> tuple[str, ...]:
        """Returns the devices that hold an optimizer's own variables."""
        return self.parameter_devices

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: object, destinations: object = None, options: object = None
    ) -> Any:
        """Reduces a value over all replicas.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: A `kdist.DistributedValues`.
            destinations: A variable or device, which is passed to a custom `kdist.CrossDeviceOps`. The result
                is on every worker.
            options: Also passed to a custom `kdist.CrossDeviceOps`.

        Returns:
            A tensor, equal on all workers.
        """
        from kdist.strategies.reductions import reduce

        if self._strategy.own_ops is None:
            return self._strategy.reduce(reduce_op, value, axis=None)
        return reduce(self._strategy, reduce_op, value, None, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[object, object]],
        options: object = None,
    ) -> list[Any]:
        """Reduces several values over all replicas; see `reduce_to`.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value_destination_pairs: Pairs of a value and its destination.
            options: As in `reduce_to`.

        Returns:
            A list with one tensor per pair.
        """
        from kdist.strategies.reductions import batch_reduce

        if self._strategy.own_ops is None:
            return [self.reduce_to(reduce_op, value, where) for value, where in value_destination_pairs]
        return batch_reduce(self._strategy, reduce_op, value_destination_pairs, options)

    def broadcast_to(self, tensor: object, destinations: object) -> Any:
        """Broadcasts a tensor to the replicas of this worker.

        Args:
            tensor: A tensor, array or number.
            destinations: As in `reduce_to`.

        Returns:
            A tensor, or the result of `broadcast` of a custom `kdist.CrossDeviceOps`.
        """
        import keras

        own, tensor = self._strategy.own_ops, keras.ops.convert_to_tensor(tensor)
        return tensor if own is None else own.broadcast(tensor, destinations)

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls a function that updates a variable, once for all replicas.

        Args:
            var: A Keras variable.
            fn: Called with the variable, then `args` and `kwargs`.
            args: Values that are equal on all replicas, for example results of `reduce_to`.
            kwargs: Keyword arguments, handled like `args`.
            group: Whether to return one value, or a list with one value per local replica.

        Returns:
            The result of the function.

        Raises:
            InvalidArgumentError: If an argument has one value per replica.
            StrategyScopeError: If you call it inside a replica.
        """
        import keras

        from kdist.strategies.reductions import require_cross_replica

        require_cross_replica("extended.update")

        def first(leaf: object) -> object:
            if isinstance(leaf, PerReplica):
                raise InvalidArgumentError(
                    "`update` received one value per replica, but it needs one value for all replicas.",
                    received={"value": leaf},
                    hint='Reduce it first: strategy.extended.reduce_to("SUM", value, destinations=var)',
                )
            return leaf.values[0] if isinstance(leaf, DistributedValues) else leaf

        equal_args, equal_kwargs = keras.tree.map_structure(first, (tuple(args), dict(kwargs or {})))
        result = fn(var, *equal_args, **equal_kwargs)
        if group:
            return result
        return keras.tree.map_structure(lambda leaf: [leaf] * len(self.worker_devices), result)

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Returns a context manager that does nothing, because all variables are already colocated."""
        return contextlib.nullcontext()

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Returns whether a Keras variable was created in the scope of this strategy."""
        from kdist.strategies.new_variables import creator_of

        return creator_of(v) is self._strategy.new_variables

    def value_container(self, value: object) -> Any:
        """Returns the value unchanged, because a Keras variable has no components."""
        return value
