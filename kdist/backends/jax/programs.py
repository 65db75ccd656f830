"""What a compiled function needs of stateful Keras code: which variables it reads and writes.

JAX compiles pure functions; Keras layers, optimisers and metrics change variables. While a function is traced, a
`keras.StatelessScope` shows it the values that came in as arguments, and keeps what it writes, to be handed out
as results. A first trace, without arguments for the state, finds out which variables there are.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from kdist import keras_hooks
from kdist.backends.replica import ReplicaScope


class Store:
    """The values of variables while a function is traced or runs.

    Args:
        variables: Those that are known to be used.
        values: Their values.
        unknown: Called for a variable that is not known; returns its value.
    """

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
    if variable._value is not None:
        return variable._value
    return variable._initializer(variable.shape, dtype=variable.dtype)


class JaxScope(ReplicaScope):
    """Shows a replica the values in a `Store`."""

    def __init__(self, replica: Any, store: Store) -> None:
        super().__init__(replica)
        self._store = store

    def local(self, variable: Any) -> Any:
        """Returns the present value."""
        return self._store.get(variable)

    def write(self, variable: Any, value: Any) -> None:
        """Keeps a value."""
        self._store.set(variable, value)

    def snapshot(self, variable: Any) -> Any:
        """Returns the present value; arrays do not change."""
        return self._store.get(variable)


class PlainScope(keras.StatelessScope):
    """Shows a function that runs in no replica the values in a `Store`."""

    def __init__(self, store: Store) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._store = store

    def get_current_value(self, variable: Any) -> Any:
        """Overrides the lookup of `keras.StatelessScope`."""
        return self._store.get(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Overrides the recording of `keras.StatelessScope`."""
        self._store.set(*update)


class GradientScope(keras.StatelessScope):
    """Shows a function the values that it is differentiated for, and keeps what it writes.

    Args:
        outer: The scope around it, to which all other variables belong; `None` for the variables themselves.
        variables: What to differentiate for.
        values: Their values.
    """

    def __init__(self, outer: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._outer = outer
        self._values = {id(v): value for v, value in zip(variables, values, strict=True)}
        self.written: dict[int, Any] = {}
        self.quiet: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        """Overrides the lookup of `keras.StatelessScope`."""
        if id(variable) in self._values:
            return self._values[id(variable)]
        if self._outer is None:
            return None if variable._value is not None else initial_value(variable)
        return self._outer.get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Overrides the recording of `keras.StatelessScope`."""
        variable, value = update
        self._values[id(variable)] = value
        self.written[id(variable)] = variable
        if getattr(self._outer, "is_untracked", False):
            self.quiet.add(id(variable))

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

        def trace(branch: Callable[[], Any]) -> Any:
            with GradientScope(outer, (), ()) as scope:
                result = branch()
                written.update(scope.written)
                return result, [scope.get_current_value(variable) for variable in written.values()]

        for branch in (true_fn, false_fn):  # which variables either one writes
            jax.eval_shape(lambda b=branch: trace(b))
        result, values = original(pred, lambda: trace(true_fn), lambda: trace(false_fn))
        for variable, value in zip(written.values(), values, strict=True):
            variable.assign(value)
        return result

    return wrapper


class Placed:
    """The variables' values on all devices, from one call to the next.

    A value is copied to all devices when it comes from elsewhere (`assign`, `load_weights`, `fit`), and not
    when it is what the last call has left.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._known: dict[int, tuple[Any, Any, Any]] = {}
        self._holders = 0

    def read(self, variables: Sequence[Any], donated: bool = False) -> list[Any]:
        """Returns the values on all devices.

        Args:
            variables: Keras variables.
            donated: Whether the buffers are going to be used for something else. Then a value that somebody else
                holds too (`old = variable.value`, `target.assign(variable)`) is copied.
        """
        found: list[Any] = [None] * len(variables)
        missing = []
        for i, variable in enumerate(variables):
            ref, shown, placed = self._known.get(id(variable), (None, None, None))
            known = ref is not None and ref() is variable and variable._value is shown
            if not known or (donated and sys.getrefcount(shown) > self._holders):
                missing.append(i)
            else:
                found[i] = placed
        if missing:
            values = self._replicas.place_state([variables[i]._value for i in missing])
            for i, placed in zip(missing, values, strict=True):
                found[i] = self._show(variables[i], placed)
        return found

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Shows new values in the variables."""
        for variable, placed in zip(variables, values, strict=True):
            self._show(variable, placed)

    def _show(self, variable: Any, placed: Any) -> Any:
        shown = placed.addressable_data(0)
        variable._value = shown
        key = id(variable)
        if key not in self._known or self._known[key][0]() is not variable:
            ref = weakref.ref(variable, functools.partial(_forget, self._known, key))
        else:
            ref = self._known[key][0]
        self._known[key] = (ref, shown, placed)
        self._holders = sys.getrefcount(shown)  # the variable, this object and the local name, as in `read`
        return placed


def _forget(known: dict[int, Any], key: int, ref: Any) -> None:
    if key in known and known[key][0] is ref:
        del known[key]


def initialize(variables: Sequence[Any]) -> bool:
    """Gives values to variables that a traced function has created; says whether there were any."""
    if all(variable._value is not None for variable in variables):
        return False
    with keras_hooks.without_scope(), keras.StatelessScope():
        pass  # Keras does it when a scope is left
    return True


def discover(
    function: Callable[[Store], Callable[[Any], Any]],
    arguments: Any,
    created: Callable[[Sequence[Any]], None] = lambda variables: None,
) -> Store:
    """Traces a function without compiling it, and returns a store that knows all variables it reads and writes.

    Args:
        function: Returns, for a store, the function to trace over it.
        arguments: Shapes and dtypes of its arguments.
        created: Called with all variables once the function has created some, which have values by then.
    """
    while True:
        store = Store((), (), initial_value)
        jax.eval_shape(function(store), arguments)
        if not initialize(store.variables):
            return store
        created(store.variables)  # and once more: a layer that is built may use other variables


def is_array(leaf: Any) -> bool:
    """Says whether a leaf of a result is data; anything else is a constant of the program."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


class Outputs:
    """What a traced function returns: arrays, which its program computes, among constants.

    Args:
        result: The structure that the function has returned.
    """

    def __init__(self, result: Any) -> None:
        leaves = keras.tree.flatten(result)
        self._arrays: list[Any] = [leaf for leaf in leaves if is_array(leaf)]
        self._constants = [(is_array(leaf), None if is_array(leaf) else leaf) for leaf in leaves]
        self._structure = keras.tree.map_structure(lambda leaf: None if leaf is None else 0, result)

    def take(self) -> list[Any]:
        """Returns the arrays of the trace, once: they must not outlive it."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def fill(self, arrays: Sequence[Any]) -> Any:
        """Returns the structure with the computed arrays."""
        data = iter(arrays)
        leaves = [next(data) if is_data else constant for is_data, constant in self._constants]
        return keras.tree.pack_sequence_as(self._structure, leaves)


def function_key(fn: Any) -> Any:
    """What must be equal for two functions to be the same program.

    A step function is often defined anew each time that a training step is called: the same code over the same
    objects. What it closes over is compared by identity, small constants by value.

    Returns:
        A tuple to compare; it holds what it identifies.
    """
    if isinstance(fn, functools.partial):
        return "partial", function_key(fn.func), constant_key(fn.args), constant_key(fn.keywords)
    if isinstance(fn, types.MethodType):
        return "method", function_key(fn.__func__), _Same(fn.__self__)
    if isinstance(fn, types.FunctionType):
        cells = tuple(_cell(cell) for cell in fn.__closure__ or ())
        return "function", fn.__code__, cells, constant_key(fn.__defaults__), constant_key(fn.__kwdefaults__)
    return "object", _Same(fn)


def _cell(cell: Any) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # a function that refers to itself, or to what is not there yet
        return None
    return function_key(value) if isinstance(value, types.FunctionType) else constant_key(value)


def constant_key(value: Any) -> Any:
    """What must be equal for two constants to be the same: small ones by value, other objects by identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(constant_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, constant_key(item)) for key, item in value.items())
    return _Same(value)


class _Same:
    """Equal to another one of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value
