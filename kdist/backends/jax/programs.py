"""Finds the variables that stateful Keras code reads and writes, so that JAX can compile it.

JAX compiles pure functions, but Keras layers, optimizers and metrics change variables. During a trace, a
`keras.StatelessScope` supplies the values of variables from the arguments. It also records new values, which
become results. A first trace, without state arguments, finds the variables.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays.rows import torch_to_numpy
from kdist.backends.aggregation import is_on_read
from kdist.backends.jax.components import has_components, place_components, place_shares
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.scopes import Values, initial_value
from kdist.backends.jax.storage import is_divided
from kdist.backends.variable_table import VariableTable
from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues

if TYPE_CHECKING:
    from typing import TypeAlias, TypeGuard

    from kdist.arrays.types import Structure, T
    from kdist.backends.jax.scopes import Held

    _Pair: TypeAlias = tuple[jax.Array, Held]

_FEW = 100  # the most items of a container that is compared by value
_all_placed: weakref.WeakSet[Placed] = weakref.WeakSet()


def assigned(variable: keras.Variable) -> None:
    """Discards stored components after an assignment outside replicas, even if the array is the same."""
    if is_on_read(variable):
        for placed in _all_placed:
            placed.forget(variable)


class Placed:
    """The values of variables on all devices, kept between calls.

    A value is copied to all devices if other code set it (`assign`, `load_weights`, `fit`). It is not copied
    if it is the result of the last call.
    """

    def __init__(self, runtime: JaxCore) -> None:
        self._runtime = runtime
        # The last native value of each variable, and its value on all devices.
        self._known: VariableTable[_Pair] = VariableTable()
        self._holders = 0
        _all_placed.add(self)

    def read(self, variables: Sequence[keras.Variable], donated: bool = False) -> list[Held]:
        """Returns values on all devices; for on-read variables, pairs of the components and the aggregate.

        If buffers are donated, the program reuses their memory. Values with other references are then copied
        (`old = variable.value`, `target.assign(variable)`).
        """
        found: list[Any] = [None] * len(variables)
        missing, components = [], {}
        for i, variable in enumerate(variables):
            if is_divided(variable):
                found[i] = _own_array(variable, donated)
                continue
            pair = self._known.get(variable)
            if pair is not None and keras_hooks.native_value(variable) is not pair[0]:
                pair = None
            if pair is None or (donated and self._is_held(pair)):
                missing.append(i)
                if has_components(self._runtime, variable):
                    components[i] = place_shares(self._runtime, variable) if pair is None else pair[1][0]
            else:
                found[i] = pair[1]
        if missing:
            values = self._runtime.place_state(
                [_strong(keras_hooks.native_value(variables[i])) for i in missing]
            )
            for i, placed in zip(missing, values, strict=True):
                found[i] = (components[i], placed) if i in components else placed
            self.write([variables[i] for i in missing], [found[i] for i in missing])
        return found

    def write(self, variables: Sequence[keras.Variable], values: Sequence[Held]) -> None:
        for pair in self._set(variables, values)[:1]:
            self._holders = sys.getrefcount(pair[0])

    def _set(self, variables: Sequence[keras.Variable], values: Sequence[Held]) -> list[_Pair]:
        """Sets the variables; returns their new pairs, except pairs of an array and itself."""
        wholes = [value[1] if isinstance(value, tuple) else value for value in values]
        shown = self._runtime.show_variables(variables, wholes)
        found = []
        for variable, value, placed in zip(variables, shown, values, strict=True):
            keras_hooks.set_native_value(variable, value)
            if is_divided(variable):
                continue  # the variable holds it
            # With a central device, only components stay on the devices; other values are used in this call.
            if not self._runtime.topology.is_central or isinstance(placed, tuple):
                self._known[variable] = pair = (value, placed)
                if value is not placed:
                    found.append(pair)
        return found

    def _is_held(self, pair: _Pair) -> bool:
        """Returns whether a variable's value has references other than the variable and `_known`."""
        is_one = pair[0] is pair[1]  # with one device, where a program's result is also the value
        return sys.getrefcount(pair[0]) > (_own_holders() + 1 if is_one else self._holders)

    def forget(self, variable: keras.Variable) -> None:
        """Makes the next program use the variable's own value."""
        self._known.pop(variable)

    def component(self, variable: keras.Variable, index: int) -> jax.Array:
        ((parts, _),) = self.read([variable])
        return parts.addressable_shards[index].data

    def write_components(
        self, variable: keras.Variable, parts: Sequence[jax.Array], total: jax.Array
    ) -> None:
        """Stores the local replicas' components of an on-read variable, and sets it to their aggregate."""
        (whole,) = self._runtime.place_state([total])
        self.write([variable], [(place_components(self._runtime, parts), whole)])


def _strong(value: jax.Array) -> jax.Array:
    """Removes JAX's weak type, for example from `keras.Variable(1.0)`, to avoid a second compilation."""
    is_weak = isinstance(value, jax.Array) and value.weak_type
    return jax.numpy.asarray(value, value.dtype) if is_weak else value


def _own_array(variable: keras.Variable, donated: bool) -> jax.Array:
    """Returns the array of a sharded variable, or a copy if it is donated and has other references."""
    value = keras_hooks.native_value(variable)
    is_held = donated and sys.getrefcount(value) > _own_holders()
    return jax.numpy.copy(value) if is_held else value


@functools.cache
def _own_holders() -> int:
    """Returns the reference count in `_own_array` if only the variable holds the array."""
    holder = [object()]
    value = holder[0]
    return sys.getrefcount(value)


def initialize(variables: Sequence[keras.Variable]) -> bool:
    """Initializes variables that a traced function has created; returns whether there are any."""
    if all(keras_hooks.native_value(variable) is not None for variable in variables):
        return False
    with keras_hooks.without_scope(), keras.StatelessScope():
        pass  # Keras initializes variables at the end of a scope
    return True


def discover(
    function: Callable[[Values], Callable[[T], object]],
    arguments: T,
    created: Callable[[Sequence[keras.Variable]], None] = lambda variables: None,
    value: Callable[[keras.Variable], Held] = initial_value,
) -> Values:
    """Traces a function without compiling it, and returns the `Values` of the variables that it uses.

    Args:
        function: Takes `Values` and returns the function to trace.
        arguments: Shapes and dtypes of the arguments of the traced function.
        created: Receives all variables if the function has created some. The new variables have values.
        value: Returns the value of a variable in the trace.
    """
    while True:
        values = Values((), (), value)
        jax.eval_shape(function(values), arguments)
        if not initialize(values.variables):
            return values
        created(values.variables)  # trace again: built layers may use other variables


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Returns whether a leaf of a result is data; all other leaves are constants of the program."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


class Template:
    """A nested structure of data and constants that is the input or output of a program.

    `data` returns the data of a leaf, or `None` for a constant. Only the constants are kept.
    """

    def __init__(self, structure: Structure, data: Callable[[object], Any]) -> None:
        leaves = [(leaf, data(leaf)) for leaf in keras.tree.flatten(structure)]
        self.data = [found for _, found in leaves if found is not None]
        self.constants = [leaf if found is None else None for leaf, found in leaves]
        self._is_data = [found is not None for _, found in leaves]
        self._structure = keras.tree.map_structure(lambda leaf: None if leaf is None else 0, structure)

    def fill(self, data: Sequence[object]) -> Any:
        left = iter(data)
        pairs = zip(self._is_data, self.constants, strict=True)
        return keras.tree.pack_sequence_as(self._structure, [next(left) if d else c for d, c in pairs])


class Call(Template):
    """The arguments of one call: constants, and arrays with one value per local replica."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object], num_local: int) -> None:
        super().__init__((args, kwargs), lambda leaf: _parts(leaf, num_local))
        self.constants = list(map(_same_constant, self.constants))

    def key(self) -> Hashable:
        """Returns a key that is equal for all calls that can run the same program."""
        shapes = tuple((tuple(parts[0].shape), str(parts[0].dtype)) for parts in self.data)
        return repr(self._structure), constant_key(tuple(self.constants)), shapes


def _parts(leaf: object, num_local: int) -> list[jax.Array | np.ndarray] | None:
    """Returns one array per local replica, or `None` for a constant."""
    if isinstance(leaf, DistributedValues):
        # NumPy has 64 bits, and a device would drop half of them. JAX raises an error.
        values = [jax.numpy.asarray(part) if type(part) is int else part for part in leaf.values]
        parts = [value if is_array(value) else np.asarray(value) for value in values]
        return None if any(part.dtype.kind in "OSU" for part in parts) else parts
    if hasattr(leaf, "detach"):
        leaf = torch_to_numpy(leaf)
    if isinstance(leaf, float):
        leaf = np.float32(leaf)
    return [leaf] * num_local if is_array(leaf) else None


def _same_constant(leaf: object) -> object:
    if not isinstance(leaf, DistributedValues):
        return leaf
    first = leaf.values[0]
    if all(constant_key(value) == constant_key(first) for value in leaf.values):
        return first
    raise InvalidArgumentError(
        "An argument differs between the replicas, but is not a number or an array. On JAX, all replicas run one "
        "program.",
        received={"value": leaf},
        hint="Pass numbers or arrays, or the same object to all replicas.",
    )


class Outputs(Template):
    """The result of a traced function: arrays, which its program computes, and constants.

    Args:
        result: A nested structure.
        same: The arrays in `result` that are the same in all local replicas.
    """

    def __init__(self, result: Structure, same: Sequence[jax.Array] = ()) -> None:
        super().__init__(result, lambda leaf: leaf if is_array(leaf) else None)
        self.same = [any(leaf is other for other in same) for leaf in self.data]
        """Whether each array is the same in all local replicas."""

    def take(self) -> list[jax.Array]:
        """Returns the arrays of the trace and drops them, because they must not outlive it."""
        arrays, self.data = self.data, []
        return arrays


def function_key(fn: object, known: dict[int, Hashable] | None = None) -> Hashable:
    """Returns a key that is equal for functions that compile to the same program.

    Training code often defines a step function again for each call, with the same code and objects. Or global
    names of a function change, for example if a notebook cell runs again. The key therefore compares the
    code, closures and globals: objects by identity, small constants by value. It references the objects.

    `known` contains the keys of the functions that refer to this one.
    """
    known = {} if known is None else known
    if isinstance(fn, functools.partial):
        return "partial", function_key(fn.func, known), constant_key(fn.args), constant_key(fn.keywords)
    if isinstance(fn, types.MethodType):
        return "method", function_key(fn.__func__, known), _Same(fn.__self__)
    if not isinstance(fn, types.FunctionType):
        call = vars(type(fn)).get("__call__")
        return (
            "object",
            _Same(fn),
            function_key(call, known) if isinstance(call, types.FunctionType) else None,
        )
    if id(fn) in known:
        return known[id(fn)]
    known[id(fn)] = "function", fn.__code__  # for recursive functions

    def key(value: object) -> Hashable:
        is_function = isinstance(value, (types.FunctionType, types.MethodType))
        return function_key(value, known) if is_function else constant_key(value)

    cells = tuple(key(value) for value in _contents(fn.__closure__ or ()))
    there = () if _is_of_library(fn) else [name for name in _names(fn.__code__) if name in fn.__globals__]
    names = tuple((name, key(fn.__globals__[name])) for name in there)
    defaults = constant_key(fn.__defaults__), constant_key(fn.__kwdefaults__)
    known[id(fn)] = "function", fn.__code__, cells, names, defaults
    return known[id(fn)]


def _is_of_library(fn: types.FunctionType) -> bool:
    """Returns whether a function is from an installed package, whose global names do not change."""
    return "-packages" in fn.__code__.co_filename or (fn.__module__ or "").startswith("kdist.")


def _contents(cells: Sequence[types.CellType]) -> Iterator[object]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            yield None


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names that code and its inner functions read, except names that they set."""
    read: dict[str, None] = {}
    written: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read[instruction.argval] = None
        elif instruction.opname == "STORE_GLOBAL":
            written.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            read |= dict.fromkeys(_names(constant))
    return tuple(name for name in read if name not in written)


def constant_key(value: object, depth: int = 4) -> Hashable:
    """Returns a key for comparing constants: small constants by value, other objects by identity."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # 0.0 is not -0.0, but NaN is NaN
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value), value
    if depth and isinstance(value, tuple) and len(value) <= _FEW:
        return tuple(constant_key(item, depth - 1) for item in value)
    if depth and isinstance(value, dict) and len(value) <= _FEW:
        return tuple((key, constant_key(item, depth - 1)) for key, item in value.items())
    return _Same(value)


class _Same:
    """Compares an object by identity, and keeps a reference to it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value
