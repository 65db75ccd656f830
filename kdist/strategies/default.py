"""`get_strategy`, and the default strategy, which does nothing and is current outside any scope."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from kdist.context import (
    ReplicaContext,
    Scope,
    current_replica,
    current_strategy,
    has_strategy,
)
from kdist.data.input_context import InputContext, ValueContext
from kdist.data.input_options import InputOptions
from kdist.errors import StrategyScopeError
from kdist.strategies.extended import StrategyExtended
from kdist.strategies.running import RunOptions
from kdist.strategies.strategy import Strategy
from kdist.values import ReduceOp, Tensor

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


def get_strategy() -> Strategy:
    """Returns the current strategy of this thread.

    Returns:
        The strategy whose scope or replica this thread is in. Outside, the default strategy.

    Example:

    >>> import kdist
    >>> kdist.get_strategy().num_replicas_in_sync
    1
    """
    current = current_strategy()
    return default_strategy() if current is None else cast(Strategy, current)


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that this thread runs.

    Returns:
        The replica context, or `None` in cross-replica context. Outside any scope, the context of the default
        strategy's only replica.
    """
    if has_strategy():
        return current_replica()
    return ReplicaContext(default_strategy(), 0)


class _NoScope(Scope[Any]):
    """Changes nothing. As in `tf.distribute`, you can enter the scope of another strategy inside it."""

    def __enter__(self) -> Strategy:
        if has_strategy():
            raise StrategyScopeError(
                "Cannot enter the scope of the default strategy inside the scope of another strategy.",
                received={"current": current_strategy()},
                hint="Leave the current scope first.",
            )
        return self.strategy

    def __exit__(self, *exc: object) -> None:
        return None


class _DefaultExtended(StrategyExtended):
    @property
    def should_checkpoint(self) -> bool:
        """Always `True`."""
        return True


class DefaultStrategy(Strategy):
    """Passes everything through: one replica, no distribution, and no changes to Keras or the backend.

    There is only one instance. `kdist.get_strategy()` returns it outside any scope.
    """

    new_variables = None  # type: ignore[assignment]

    def __init__(self) -> None:
        # Creates no runtime, so that models behave as without kdist.
        pass

    @property
    def runtime(self) -> Runtime:
        """Raises an error, because kdist does not choose devices without a strategy."""
        raise StrategyScopeError(
            "The default strategy has no devices.",
            received={"strategy": self},
            hint="Create a strategy, for example: strategy = kdist.MirroredStrategy()",
        )

    @property
    def extended(self) -> StrategyExtended:
        return _DefaultExtended(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1."""
        return 1

    def __repr__(self) -> str:
        return "<default strategy of kdist: 1 replica, nothing is distributed>"

    def scope(self) -> Scope[Self]:
        """Returns a no-op context manager that raises an error inside the scope of another strategy."""
        return _NoScope(self, contextlib.nullcontext)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Any:
        """Returns the function's dataset for the only pipeline."""
        return dataset_fn(InputContext())

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> Any:
        """Returns the dataset unchanged."""
        return dataset

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls the function and returns its result."""
        return fn(*args, **(kwargs or {}))

    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Reduces only along the axis, because there is one replica."""
        op = ReduceOp.of(reduce_op)
        if axis is None:
            return value
        import keras

        from kdist.strategies.reductions import checked_axes

        along = keras.ops.sum if op is ReduceOp.SUM else keras.ops.mean

        def reduce(leaf: object) -> Tensor:
            tensor = keras.ops.convert_to_tensor(leaf)
            return along(tensor, axis=checked_axes(axis, len(tensor.shape)))

        return keras.tree.map_structure(reduce, value)

    def gather(self, value: object, axis: int) -> Any:
        """Returns the value unchanged, because there is one replica."""
        return value

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Any:
        """Returns the function's value for the only replica."""
        return value_fn(ValueContext())

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns a tuple with the value of the only replica."""
        return (value,)


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the only instance of the default strategy."""
    return DefaultStrategy()
