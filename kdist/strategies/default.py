"""`get_strategy`, and the default strategy, which is current where no other one is: it does nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from kdist.context import (
    ReplicaContext,
    Scope,
    checked_axis,
    current_replica,
    current_strategy,
    has_strategy,
)
from kdist.data.input_context import InputContext, ValueContext
from kdist.data.input_options import InputOptions
from kdist.errors import StrategyScopeError
from kdist.strategies.running import RunOptions
from kdist.strategies.strategy import Strategy
from kdist.values import ReduceOp


def get_strategy() -> Strategy:
    """Returns the current strategy of this thread, or the default strategy where there is none.

    Returns:
        The strategy whose scope is the innermost one; else the default strategy, which does nothing.

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
        The replica context; `None` in cross-replica context. Where no strategy is in scope, the only replica
        of the default strategy.
    """
    if has_strategy():
        return current_replica()
    return ReplicaContext(default_strategy(), 0)


class _NoScope(Scope[Any]):
    """Changes nothing: as with `tf.distribute`, in it there is no strategy, and any other may be entered."""

    def __enter__(self) -> Any:
        if has_strategy():
            raise StrategyScopeError(
                "Cannot enter the scope of the default strategy inside the scope of another strategy.",
                received={"current": current_strategy()},
                hint="Leave the current scope first.",
            )
        return self.strategy

    def __exit__(self, *exc: object) -> None:
        return None


class DefaultStrategy(Strategy):
    """Passes everything through: one replica, no distribution, and neither Keras nor a framework touched.

    A singleton; obtained by `kdist.get_strategy()` outside any scope.
    """

    def __init__(self) -> None:
        # Deliberately without a runtime: models created under it behave as without kdist.
        pass

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1."""
        return 1

    def __repr__(self) -> str:
        return "<default strategy of kdist: 1 replica, nothing is distributed>"

    def scope(self) -> Scope[Self]:
        """Returns a context manager that does nothing but refuse to be entered under another strategy."""
        return _NoScope(self, contextlib.nullcontext)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset that the function makes for the only pipeline."""
        return dataset_fn(InputContext())

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Returns the dataset as it is."""
        return dataset

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls the function."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduces along the axis; over the only replica there is nothing to reduce."""
        op = ReduceOp.of(reduce_op)
        if axis is None:
            return value
        import keras

        along = keras.ops.sum if op is ReduceOp.SUM else keras.ops.mean

        def reduce(leaf: Any) -> Any:
            tensor = keras.ops.convert_to_tensor(leaf)
            return along(tensor, axis=checked_axis(axis, len(tensor.shape)))

        return keras.tree.map_structure(reduce, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the value of the only replica."""
        return value

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns what the function makes for the only replica."""
        return value_fn(ValueContext())

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the value of the only replica, in a tuple."""
        return (value,)


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the only default strategy."""
    return DefaultStrategy()
