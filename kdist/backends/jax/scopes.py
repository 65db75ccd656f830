"""Scopes through which stateful Keras code reads and writes variables during a trace on JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras

from kdist import keras_hooks
from kdist.backends.aggregation import NotesAdditions, ReplicaScope, check_branch
from kdist.backends.jax.storage import in_own_shape
from kdist.context import current_replica


class Values:
    """The values of variables in a traced or running function; `unknown` returns missing values."""

    def __init__(
        self, variables: Sequence[Any], values: Sequence[Any], unknown: Callable[[Any], Any]
    ) -> None:
        self.variables = list(variables)
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self._unknown = unknown
        self.written: dict[int, Any] = {}

    def get(self, variable: Any) -> Any:
        """Returns the current value of a variable."""
        if id(variable) not in self._values:
            self._values[id(variable)] = self._unknown(variable)
            self.variables.append(variable)
        return self._values[id(variable)]

    def set(self, variable: Any, value: Any) -> None:
        """Sets the value of a variable."""
        self.get(variable)
        self._values[id(variable)] = value
        self.written[id(variable)] = variable

    def results(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the final values of some variables."""
        return [self._values[id(variable)] for variable in variables]


def initial_value(variable: Any) -> Any:
    """Returns a variable's value for the first trace; new variables use their initializers."""
    value = keras_hooks.native_value(variable)
    return keras_hooks.first_value(variable) if value is None else in_own_shape(variable, value)


class JaxScope(ReplicaScope):
    """Provides `Values` to a replica; for on-read variables, pairs of component and aggregate."""

    _crossing: dict[int, Any] | None = None

    def __init__(self, replica: Any, values: Values) -> None:
        super().__init__(replica)
        self._replica: Any = replica
        self._values = values

    def local(self, variable: Any) -> Any:
        """Returns the current value."""
        value = self._values.get(variable)
        crossing = self._crossing is not None
        if self.has_component(variable):
            value = value[crossing]
        return self._replica.for_all(value) if crossing else value

    def write(self, variable: Any, value: Any) -> None:
        """Stores a new value."""
        if self._crossing is not None:
            self._crossing[id(variable)] = variable
        if self.has_component(variable):
            if self._crossing is not None:
                value = (self.share_of(variable, value), value)
            else:
                value = (value, self._values.get(variable)[1])
        self._values.set(variable, value)

    def show(self, variable: Any, total: Any) -> None:
        """Stores the aggregate of the components."""
        self._values.set(variable, (self._values.get(variable)[0], total))

    def snapshot(self, variable: Any) -> Any:
        """Returns the current value without a copy, because arrays are immutable."""
        return self.local(variable)

    @contextlib.contextmanager
    def crossing(self) -> Iterator[list[tuple[Any, Any]]]:
        """A context in which the function acts for all replicas, which all write the same values.

        Yields:
            A list. At the end, it contains a pair of variable and value for each written variable.
        """
        outer, self._crossing = self._crossing, {}
        written: list[tuple[Any, Any]] = []
        try:
            with self.untracked():
                yield written
                written += [(variable, self.local(variable)) for variable in self._crossing.values()]
        finally:
            self._crossing = outer


class PlainScope(NotesAdditions, keras.StatelessScope):
    """Provides `Values` to a function that runs outside replicas."""

    def __init__(self, values: Values) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._values = values

    def get_current_value(self, variable: Any) -> Any:
        """Overrides the lookup of `keras.StatelessScope`."""
        return self._values.get(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Overrides the recording of `keras.StatelessScope`."""
        self._values.set(*update)


class GradientScope(NotesAdditions, keras.StatelessScope):
    """Provides the values for which a function is differentiated, and records its writes.

    The values of other variables come from the outer scope, or from the variables if there is no outer scope.
    """

    def __init__(self, outer: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._outer = outer
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self.written: dict[int, Any] = {}
        self._quiet: set[int] = set()
        self.set_anew: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        """Overrides the lookup of `keras.StatelessScope`."""
        if id(variable) in self._values:
            return self._values[id(variable)]
        if self._outer is None:
            return None if keras_hooks.native_value(variable) is not None else initial_value(variable)
        return self._outer.get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Overrides the recording of `keras.StatelessScope`."""
        variable, value = update
        self._values[id(variable)] = value
        self.written[id(variable)] = variable
        if self.is_untracked:
            self._quiet.add(id(variable))
        elif not (self.is_adding or getattr(self._outer, "is_adding", False)):
            self.set_anew.add(id(variable))

    @property
    def is_untracked(self) -> bool:
        """Whether current writes need no aggregation."""
        return bool(getattr(self._outer, "is_untracked", False))

    def write_outside(self, values: Sequence[Any]) -> None:
        """Writes `results` to the outer scope, in the same way as they were written here."""
        for (key, variable), value in zip(self.written.items(), values, strict=True):
            with contextlib.ExitStack() as stack:
                if key in self._quiet:
                    stack.enter_context(self._outer.untracked())
                if key not in self.set_anew and hasattr(self._outer, "adding"):
                    stack.enter_context(self._outer.adding())
                variable.assign(value)

    def untracked(self) -> Any:
        """Returns a context in which all replicas are known to write equal values."""
        return self._outer.untracked()

    def results(self) -> list[Any]:
        """Returns the values of the written variables, in the order of their first writes."""
        return [self._values[key] for key in self.written]


def cond(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Keras's `cond`, so that its branches can write variables, as in a `LossScaleOptimizer`."""

    def wrapper(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        outer = keras_hooks.stateless_scope()
        if not isinstance(outer, (JaxScope, PlainScope, GradientScope)):
            return original(pred, true_fn, false_fn)
        written: dict[int, Any] = {}
        set_anew: set[int] = set()

        def trace(branch: Callable[[], Any]) -> Any:
            with GradientScope(outer, (), ()) as scope:
                result = branch()
                written.update(scope.written)
                set_anew.update(scope.set_anew)
                return result, [scope.get_current_value(variable) for variable in written.values()]

        for branch in (true_fn, false_fn):  # finds the variables that either branch writes
            jax.eval_shape(lambda b=branch: trace(b))
        result, values = original(pred, lambda: trace(true_fn), lambda: trace(false_fn))
        for variable, value in zip(written.values(), values, strict=True):
            is_plain = current_replica() is None or getattr(outer, "is_untracked", False)
            if id(variable) in set_anew and not is_plain:
                check_branch(variable)
            with outer.adding() if id(variable) not in set_anew else contextlib.nullcontext():
                variable.assign(value)
        return result

    return wrapper
