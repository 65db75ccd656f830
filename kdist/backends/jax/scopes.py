"""Scopes through which stateful Keras code reads and writes variables during a trace on JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import keras

from kdist import keras_hooks
from kdist.backends.aggregation import NotesAdditions, ReplicaScope, check_branch, share_of
from kdist.backends.jax.storage import in_own_shape
from kdist.context import current_replica
from kdist.errors import StrategyScopeError

if TYPE_CHECKING:
    Held: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]
    """What a program holds of a variable: its value; for an on-read variable, its component and the aggregate."""
    from contextlib import AbstractContextManager

    from kdist.arrays.types import T
    from kdist.backends.jax.replicas import JaxReplica


class Values:
    """The values of variables in a traced or running function; `unknown` returns missing values."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[Held],
        unknown: Callable[[keras.Variable], Held],
    ) -> None:
        self.variables = list(variables)
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self._unknown = unknown
        self.written: dict[int, keras.Variable] = {}

    def get(self, variable: keras.Variable) -> Held:
        if id(variable) not in self._values:
            self._values[id(variable)] = self._unknown(variable)
            self.variables.append(variable)
        return self._values[id(variable)]

    def set(self, variable: keras.Variable, value: Held) -> None:
        self.get(variable)
        self._values[id(variable)] = value
        self.written[id(variable)] = variable

    def results(self, variables: Sequence[keras.Variable]) -> list[Held]:
        """Returns the final values of some variables."""
        return [self._values[id(variable)] for variable in variables]


def initial_value(variable: keras.Variable) -> jax.Array:
    """Returns a variable's value for the first trace; new variables use their initializers."""
    value = keras_hooks.native_value(variable)
    return keras_hooks.first_value(variable) if value is None else in_own_shape(variable, value)


class JaxScope(ReplicaScope):
    """Provides `Values` to a replica; for on-read variables, pairs of component and aggregate."""

    _crossing: dict[int, keras.Variable] | None = None

    def __init__(self, replica: JaxReplica, values: Values) -> None:
        super().__init__(replica)
        self._replica: JaxReplica = replica
        self.num_writers = replica.num_replicas_in_sync
        self._values = values

    def local(self, variable: keras.Variable) -> jax.Array:
        value = self._values.get(variable)
        crossing = self._crossing is not None
        if self.has_component(variable):
            value = value[crossing]
        return self._replica.for_all(value) if crossing else value

    def write(self, variable: keras.Variable, value: jax.Array) -> None:
        if self._crossing is not None:
            self._crossing[id(variable)] = variable
        if self.has_component(variable):
            if self._crossing is not None:
                share = share_of(variable, value, self._replica.replica_id_in_sync_group, self.num_writers)
                value = (share, value)
            else:
                value = (value, self._values.get(variable)[1])
        self._values.set(variable, value)

    def show(self, variable: keras.Variable, total: jax.Array) -> None:
        self._values.set(variable, (self._values.get(variable)[0], total))

    def snapshot(self, variable: keras.Variable) -> jax.Array:
        """Returns the current value without a copy, because arrays are immutable."""
        return self.local(variable)

    @contextlib.contextmanager
    def crossing(self) -> Iterator[list[tuple[keras.Variable, jax.Array]]]:
        """A context in which the function acts for all replicas, which all write the same values.

        Yields a list that contains a pair of variable and value for each written variable at the end.
        """
        outer, self._crossing = self._crossing, {}
        written: list[tuple[keras.Variable, jax.Array]] = []
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

    def get_current_value(self, variable: keras.Variable) -> Held:
        return self._values.get(variable)

    def add_update(self, update: tuple[keras.Variable, jax.Array]) -> None:
        self._values.set(*update)


class GradientScope(NotesAdditions, keras.StatelessScope):
    """Provides the values for which a function is differentiated, and records its writes.

    The values of other variables come from the outer scope, or from the variables if there is no outer scope.
    """

    def __init__(self, outer: Any, variables: Sequence[keras.Variable], values: Sequence[jax.Array]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._outer = outer
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self.written: dict[int, keras.Variable] = {}
        self._quiet: set[int] = set()
        self.set_anew: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        if id(variable) in self._values:
            return self._values[id(variable)]
        if self._outer is None:
            return None if keras_hooks.native_value(variable) is not None else initial_value(variable)
        return self._outer.get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, jax.Array]) -> None:
        variable, value = update
        if id(variable) in self.written and self.is_untracked != (id(variable) in self._quiet):
            self._refuse_both(variable)
        self._values[id(variable)] = value
        self.written[id(variable)] = variable
        if self.is_untracked:
            self._quiet.add(id(variable))
        elif not (self.is_adding or getattr(self._outer, "is_adding", False)):
            self.set_anew.add(id(variable))

    @property
    def num_writers(self) -> int:
        """The number of replicas that may write, or 1 outside replicas."""
        return getattr(self._outer, "num_writers", 1)

    def _refuse_both(self, variable: keras.Variable) -> None:
        """Raises an error for writes that need aggregation next to writes that all replicas have aggregated."""
        if self.num_writers == 1:
            return
        raise StrategyScopeError(
            "A function for `kdist.value_and_grad` writes a variable both in the replicas and in a `merge_call` or an "
            "optimizer. JAX aggregates the writes after the gradient, and cannot separate them.",
            received={"variable": variable.path},
            hint="Move the `merge_call` out of the function, or write two variables.",
        )

    @property
    def is_untracked(self) -> bool:
        """Whether current writes need no aggregation."""
        return bool(getattr(self._outer, "is_untracked", False))

    def write_outside(self, values: Sequence[jax.Array]) -> None:
        """Writes `results` to the outer scope, in the same way as they were written here."""
        for (key, variable), value in zip(self.written.items(), values, strict=True):
            with contextlib.ExitStack() as stack:
                if key in self._quiet:
                    stack.enter_context(self._outer.untracked())
                if key not in self.set_anew and hasattr(self._outer, "adding"):
                    stack.enter_context(self._outer.adding())
                variable.assign(value)

    def untracked(self) -> AbstractContextManager[None]:
        """Returns a context in which all replicas are known to write equal values."""
        return self._outer.untracked()

    def results(self) -> list[jax.Array]:
        """Returns the values of the written variables, in the order of their first writes."""
        return [self._values[key] for key in self.written]


def cond(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Keras's `cond`, so that its branches can write variables, as in a `LossScaleOptimizer`."""

    def wrapper(pred: jax.Array, true_fn: Callable[[], T], false_fn: Callable[[], T]) -> T:
        outer = keras_hooks.stateless_scope()
        if not isinstance(outer, (JaxScope, PlainScope, GradientScope)):
            return original(pred, true_fn, false_fn)
        written: dict[int, keras.Variable] = {}
        set_anew: set[int] = set()

        def trace(branch: Callable[[], T]) -> tuple[T, list[jax.Array]]:
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
