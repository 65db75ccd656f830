"""The strategy that is current where no other one is: it does nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from kdist.context import Scope, get_strategy, has_strategy
from kdist.data.input_context import InputContext, ValueContext
from kdist.data.input_options import InputOptions
from kdist.errors import StrategyScopeError
from kdist.strategies.strategy import Strategy


class _NoScope(Scope):
    """Changes nothing: as with `tf.distribute`, in it there is no strategy, and any other may be entered."""

    def __enter__(self) -> Strategy:
        if has_strategy():
            raise StrategyScopeError(
                "Strategies cannot be mixed: inside the scope of one, the default one cannot be entered.",
                received={"current": get_strategy()},
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

    def scope(self) -> Scope:
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

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns what the function makes for the only replica."""
        return value_fn(ValueContext())


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the only default strategy."""
    return DefaultStrategy()
