"""What stateful Keras code sees while a function is traced on JAX: the values of variables, and what it writes."""

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
    """The values of variables while a function is traced or runs; `unknown` gives that of one that is not known yet."""

    def __init__(
        self, variables: Sequence[Any], values: Sequence[Any], unknown: Callable[[Any], Any]
    ) -> None:
        self.variables = list(variables)
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self._unknown = unknown
        self.written: dict[int, Any] = {}

    def get(self, variable: Any) -> Any:
        """Returns the present value of a variable."""
        if id(variable) not in self._values:
            self._values[id(variable)] = self._unknown(variable)
            self.variables.append(variable)
        return self._values[id(variable)]

    def set(self, variable: Any, value: Any) -> None:
        """Changes the value of a variable."""
        self.get(variable)
        self._values[id(variable)] = value
        self.written[id(variable)] = variable

    def results(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of some variables at the end."""
        return [self._values[id(variable)] for variable in variables]


def initial_value(variable: Any) -> Any:
    """The value of a variable as the first trace sees it; one that the function creates has none yet."""
    value = keras_hooks.native_value(variable)
    return keras_hooks.first_value(variable) if value is None else in_own_shape(variable, value)


class JaxScope(ReplicaScope):
    """Shows a replica its `Values`: of on-read variables, pairs of component and aggregate."""

    _crossing: dict[int, Any] | None = None

    def __init__(self, replica: Any, values: Values) -> None:
        super().__init__(replica)
        self._replica: Any = replica
        self._values = values

    def local(self, variable: Any) -> Any:
        """Returns the present value."""
        value = self._values.get(variable)
        crossing = self._crossing is not None
        if self.has_component(variable):
            value = value[crossing]
        return self._replica.for_all(value) if crossing else value

    def write(self, variable: Any, value: Any) -> None:
        """Keeps a value."""
        if self._crossing is not None:
            self._crossing[id(variable)] = variable
        if self.has_component(variable):
            if self._crossing is not None:
                value = (self.share_of(variable, value), value)
            else:
                value = (value, self._values.get(variable)[1])
        self._values.set(variable, value)

    def show(self, variable: Any, total: Any) -> None:
        """Keeps what the components aggregate to."""
        self._values.set(variable, (self._values.get(variable)[0], total))

    def snapshot(self, variable: Any) -> Any:
        """Returns the present value; arrays do not change."""
        return self.local(variable)

    @contextlib.contextmanager
    def crossing(self) -> Iterator[list[tuple[Any, Any]]]:
        """Within this, the function speaks for all replicas, which all get to write the same values.

        Yields:
            A list that has pairs of variables and their values in the end, of those that were written.
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
    """Shows a function that runs in no replica the `Values`."""

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
    """Shows a function the values that it is differentiated for, and keeps what it writes.

    All other variables belong to the scope around it, or are themselves.
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
        """Whether what is written now needs no aggregation."""
        return bool(getattr(self._outer, "is_untracked", False))

    def write_outside(self, values: Sequence[Any]) -> None:
        """Writes `results` in the scope around this one, as they were written here."""
        for (key, variable), value in zip(self.written.items(), values, strict=True):
            with contextlib.ExitStack() as stack:
                if key in self._quiet:
                    stack.enter_context(self._outer.untracked())
                if key not in self.set_anew and hasattr(self._outer, "adding"):
                    stack.enter_context(self._outer.adding())
                variable.assign(value)

    def untracked(self) -> Any:
        """Within this, writes are known to be equal on all replicas."""
        return self._outer.untracked()

    def results(self) -> list[Any]:
        """The values of the variables that were written, in the order of their first writes."""
        return [self._values[key] for key in self.written]


def cond(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Keras's `cond`: the branches may write variables, such as those of a `LossScaleOptimizer`."""

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

        for branch in (true_fn, false_fn):  # which variables either one writes
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
