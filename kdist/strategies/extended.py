"""`Strategy.extended`: what libraries of TensorFlow's, and users who write their own, ask of a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kdist.context import StrategyLike
from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues, PerReplica, ReduceOp


class StrategyExtended:
    """The parts of a strategy that most users need not know, in the words of `tf.distribute`.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended

    Args:
        strategy: The strategy that these are parts of.
    """

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this worker on which replicas run."""
        return tuple(self._strategy.runtime.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this worker that hold variables."""
        return self._strategy.runtime.topology.parameter_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all shapes must be known: never."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker is the one that writes what is written once: the chief."""
        return self._strategy.runtime.worker_index == 0

    @property
    def should_save_summary(self) -> bool:
        """As `should_checkpoint`, for summaries."""
        return self.should_checkpoint

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Returns where an optimizer's own variables lie."""
        return self.parameter_devices

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None, options: Any = None
    ) -> Any:
        """Reduces a value over all replicas.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value: A `kdist.DistributedValues`.
            destinations: A variable or device, for a `kdist.CrossDeviceOps` of your own: the result is on every
                worker.
            options: As `destinations`.

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
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces several values over all replicas; see `reduce_to`.

        Args:
            reduce_op: `kdist.ReduceOp.SUM` or `MEAN`, or its name.
            value_destination_pairs: Pairs of a value and its destination.
            options: As in `reduce_to`.

        Returns:
            A list of tensors.
        """
        from kdist.strategies.reductions import batch_reduce

        if self._strategy.own_ops is None:
            return [self.reduce_to(reduce_op, value, where) for value, where in value_destination_pairs]
        return batch_reduce(self._strategy, reduce_op, value_destination_pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Returns a tensor as all replicas of this worker have it.

        Args:
            tensor: A tensor, array or number.
            destinations: As in `reduce_to`.

        Returns:
            A tensor; what `broadcast` of a `kdist.CrossDeviceOps` of your own returns.
        """
        import keras

        own, tensor = self._strategy.own_ops, keras.ops.convert_to_tensor(tensor)
        return tensor if own is None else own.broadcast(tensor, destinations)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls a function that changes a variable, for all replicas at once.

        Args:
            var: A Keras variable.
            fn: Called with the variable, then `args` and `kwargs`.
            args: Values that are equal on all replicas, such as `reduce_to` returns.
            kwargs: As `args`.
            group: Whether to return one value for all replicas, or a list of one for each of this worker's.

        Returns:
            What the function returns.

        Raises:
            InvalidArgumentError: An argument has a value for each replica.
            StrategyScopeError: Inside a replica.
        """
        import keras

        from kdist.strategies.reductions import require_cross_replica

        require_cross_replica("extended.update")

        def first(leaf: Any) -> Any:
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

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Returns a context manager in which variables lie where another one does: they all do."""
        return contextlib.nullcontext()

    def variable_created_in_scope(self, v: Any) -> bool:
        """Says whether a Keras variable was created in the scope of this strategy."""
        return self._strategy.new_variables.has_seen(v)

    def value_container(self, value: Any) -> Any:
        """Returns the container that a component of a value belongs to; a Keras variable has no components."""
        return value
