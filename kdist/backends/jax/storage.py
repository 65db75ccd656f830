"""Variables that are sharded over a mesh: how kdist stores and reads them.

A sharded variable holds one array over all devices of all workers, with one shard per device. If no layout
shards a variable, it holds an array of this process, as under other strategies. This array is uncommitted, so
JAX can combine it with arrays over the mesh and with arrays on one device.

JAX only splits an axis into equal parts. Other axes are padded with zeros while a variable is stored between
programs. Programs remove the padding first and add it last. This moves no data between devices, because XLA
can split any axis inside a program. Code that reads or assigns the variable sees its own shape.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdist import keras_hooks
from kdist.backends.aggregation import is_on_read
from kdist.backends.messages import wait_to_read
from kdist.backends.variable_table import VariableTable
from kdist.topology import LocalParts, Sharded

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime

_EACH_DIVIDES = ("int8", "uint8")  # quantized weights; other integers are counters and seeds


class Place(NamedTuple):
    """Where a variable is stored: the runtime of its workers, its sharding, and its shape with padding."""

    runtime: Any
    sharding: NamedSharding
    shape: tuple[int, ...]


_places: VariableTable[Place] = VariableTable()
_kept: VariableTable[np.ndarray] = VariableTable()


class Storage:
    """Shards the variables of one runtime over its mesh, by the layout of its topology."""

    def __init__(self, runtime: Any, sharded: Sharded) -> None:
        self._runtime = runtime
        self._layout = sharded.layout
        self._lengths: dict[str, int] = dict(runtime.mesh.shape)

    def take(self, variables: Sequence[keras.Variable]) -> None:
        """Shards new variables, which are whole on every worker and have equal values."""
        variables = [variable for variable in variables if _places.get(variable) is None]
        shardings = [self._sharding(variable) for variable in variables]  # raises all errors first
        for variable, sharding in zip(variables, shardings, strict=True):
            _places[variable] = Place(self._runtime, sharding, _padded_shape(variable.shape, sharding))
            value = assigned_value(variable, keras_hooks.native_value(variable))
            keras_hooks.set_native_value(variable, value)

    def sharding(self, variable: keras.Variable) -> NamedSharding:
        place = _places.get(variable)
        return self._runtime.replicated if place is None else place.sharding

    @contextlib.contextmanager
    def outputs(self) -> Iterator[None]:
        """A context for tracing a step, in which the layout shards the outputs of layers."""
        if not hasattr(self._layout, "of_output"):
            yield
            return
        keras.distribution.set_distribution(self)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    def get_tensor_layout(self, path: str) -> NamedSharding | None:
        """Returns the sharding of a layer's output; Keras's layers call this method of a distribution."""
        axes = self._layout.of_output(path)  # type: ignore[attr-defined]
        return None if axes is None else NamedSharding(self._runtime.mesh, PartitionSpec(*axes))

    def _sharding(self, variable: keras.Variable) -> NamedSharding:
        axes: Sequence[str | None] = ()
        if _may_be_divided(variable):
            path = keras_hooks.owner_path(variable)
            axes = self._layout(path, tuple(variable.shape), self._lengths)
        return NamedSharding(self._runtime.mesh, PartitionSpec(*axes))


def _may_be_divided(variable: keras.Variable) -> bool:
    """Returns `False` for metrics, counters and seeds: they are small, and single workers read them."""
    if is_on_read(variable) or variable.aggregation == "sum" or not variable.shape:
        return False
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return keras.backend.is_float_dtype(dtype) or dtype in _EACH_DIVIDES


def is_divided(variable: keras.Variable) -> bool:
    """Returns whether a variable's value is an array over several devices."""
    place = _places.get(variable)
    return place is not None and not place.sharding.is_fully_replicated


def arranged(value: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a value in the form that a variable with this sharding holds; all workers pass equal values."""
    if isinstance(value, jax.core.Tracer):
        return value
    over_mesh = isinstance(value, jax.Array) and value.sharding.device_set == sharding.device_set
    if sharding.is_fully_replicated:
        if over_mesh and not value.is_fully_replicated:
            value = jax.device_put(value, sharding)
        return _uncommitted(value.addressable_data(0) if over_mesh else value)
    if over_mesh:
        is_so = value.sharding.is_equivalent_to(sharding, value.ndim)
        return value if is_so else jax.device_put(value, sharding)
    host = np.asarray(value)
    # Copy each shard, because JAX shares suitably aligned memory, here of the whole array.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def _uncommitted(value: jax.Array) -> jax.Array:
    """Returns an array that JAX may move to the devices of a computation; there is no public function."""
    from jax._src.array import ArrayImpl

    if not isinstance(value, ArrayImpl) or not value._committed:
        return value
    return ArrayImpl(value.aval, value.sharding, value._arrays, committed=False)


def _padded_shape(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """Rounds a shape up, so that the mesh divides all axes."""
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    parts = [1 if name is None else sharding.mesh.shape[name] for name in spec]
    return tuple(-(-length // number) * number for length, number in zip(shape, parts, strict=True))


def _place(variable: keras.Variable) -> Place:
    place = _places.get(variable)
    assert place is not None
    return place


def is_padded(variable: keras.Variable) -> bool:
    place = _places.get(variable)
    return place is not None and place.shape != tuple(variable.shape)


def stored(variable: keras.Variable, value: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Returns a value in the form that a variable stores, with padding if needed."""
    if not is_padded(variable):
        return value
    widths = [(0, length - own) for length, own in zip(_place(variable).shape, value.shape, strict=True)]
    return (jax.numpy if isinstance(value, jax.Array) else np).pad(value, widths)


def in_own_shape(variable: keras.Variable, value: jax.Array) -> jax.Array:
    """Returns a stored value without padding, in a trace."""
    return jax.lax.slice(value, [0] * value.ndim, variable.shape) if is_padded(variable) else value


def divided(variable: keras.Variable, value: jax.Array) -> jax.Array:
    """Returns a stored value without padding, in a step; prevents XLA from gathering the value first."""
    own = in_own_shape(variable, value)
    return own if own is value else jax.lax.with_sharding_constraint(own, _place(variable).sharding)


def assigned_value(variable: keras.Variable, value: jax.Array) -> jax.Array:
    """Returns the value to store if a variable is assigned outside replicas; its sharding stays the same."""
    place = _places.get(variable)
    if place is None:
        return value
    if is_padded(variable) and not isinstance(value, jax.core.Tracer):
        value = stored(variable, whole(value, place.sharding.mesh))
    found = arranged(value, place.sharding)
    # It can be the array of another variable. A step reuses the memory of its variables, so they need a copy each.
    is_shared = found is value and is_divided(variable) and not isinstance(value, jax.core.Tracer)
    return found.copy() if is_shared else found


def whole(value: jax.Array, mesh: Mesh) -> np.ndarray:
    """Returns a whole array. If it is sharded over workers, all workers must call this function."""
    if not value.is_fully_addressable and not value.is_fully_replicated:
        value = jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    return np.asarray(value)


def read(variable: keras.Variable) -> np.ndarray | None:
    """Returns the whole value if it is padded, or sharded over workers (all must call this); else `None`."""
    kept = _kept.get(variable)
    if kept is not None or not (is_over_workers(variable) or is_padded(variable)):
        return kept
    runtime = _place(variable).runtime
    if is_over_workers(variable):
        wait_to_read(runtime, [variable])
    with runtime.engine_errors(), runtime.group.working():
        return whole_of(runtime, variable)


def shown(variable: keras.Variable, value: jax.Array) -> jax.Array:
    """Returns a value without padding, in a trace or as an array of this process."""
    if not is_padded(variable) or isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        return in_own_shape(variable, value)
    return jax.numpy.asarray(read(variable), value.dtype)


def whole_of(runtime: Any, variable: keras.Variable) -> np.ndarray:
    """Returns a whole sharded variable. If it is sharded over workers, all of them must call this."""
    found = whole(keras_hooks.native_value(variable), runtime.mesh)
    return found[tuple(slice(length) for length in variable.shape)]


def is_over_workers(variable: keras.Variable) -> bool:
    """Returns whether other workers hold shards of a variable that this worker lacks."""
    return is_divided(variable) and not keras_hooks.native_value(variable).is_fully_addressable


@contextlib.contextmanager
def kept_whole(runtime: Runtime, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Lets single workers read variables that are sharded over workers. All workers must enter it."""
    divided = [variable for variable in variables if is_over_workers(variable)]
    if not divided:
        yield
        return
    wait_to_read(runtime, divided)
    try:
        with runtime.engine_errors(), runtime.group.working():
            for variable in divided:
                _kept[variable] = whole_of(runtime, variable)
        yield
    finally:
        for variable in divided:
            _kept.pop(variable)


def local_parts(variable: keras.Variable) -> LocalParts | None:
    """Returns this worker's parts of a variable; `None` if not exactly one axis is sharded over workers."""
    found = _sharded_axis(variable) if is_over_workers(variable) else None
    stored_as = keras.backend.standardize_dtype(keras_hooks.native_value(variable).dtype)
    if found is None or stored_as != variable.dtype:  # JAX may store float64 as float32
        return None
    axis, size, copies = found
    place, parts, to_save = _place(variable), {}, []
    for device, number, copy in _on_devices(place.sharding, place.shape, axis, size):
        part = number * size, min((number + 1) * size, variable.shape[axis])
        if part[0] >= part[1]:
            continue
        parts[part] = functools.partial(_on_host, variable, device, axis, part[1] - part[0])
        if copy == number % copies:  # the devices that hold copies of a part take turns
            to_save.append(part)
    return LocalParts(axis, parts, tuple(to_save), functools.partial(_assign_parts, variable))


@functools.lru_cache(maxsize=4096)
def _on_devices(
    sharding: NamedSharding, shape: tuple[int, ...], axis: int, size: int
) -> list[tuple[jax.Device, int, int]]:
    """Returns this worker's devices, with the number of the part that each holds, and the number of its copy."""
    found = []
    taken: collections.Counter[int] = collections.Counter()
    for device, index in sharding.devices_indices_map(shape).items():
        number = (index[axis].start or 0) // size
        if device.process_index == jax.process_index():
            found.append((device, number, taken[number]))
        taken[number] += 1
    return found


def _on_host(variable: keras.Variable, device: jax.Device, axis: int, length: int) -> np.ndarray:
    """Returns a device's part of a variable, without padding."""
    # Not found earlier, because a reference to the part would keep its memory while a restore assigns another value.
    shards = keras_hooks.native_value(variable).addressable_shards
    array = next(np.asarray(shard.data) for shard in shards if shard.device == device)
    return array[(*[slice(None)] * axis, slice(length))]


def _assign_parts(variable: keras.Variable, parts: Mapping[tuple[int, int], np.ndarray]) -> None:
    place, found = _place(variable), _sharded_axis(variable)
    assert found is not None
    axis, size, _ = found

    def padded(index: tuple[slice, ...]) -> np.ndarray:
        shape = list(variable.shape)
        shape[axis] = size
        result = np.zeros(shape, variable.dtype)
        start = index[axis].start or 0
        part = start, min(start + size, variable.shape[axis])
        if part in parts:  # otherwise, it consists of padding
            result[(*[slice(None)] * axis, slice(part[1] - part[0]))] = parts[part]
        return result

    value = jax.make_array_from_callback(place.shape, place.sharding, padded)
    keras_hooks.set_native_value(variable, value)


def _sharded_axis(variable: keras.Variable) -> tuple[int, int, int] | None:
    """Returns the only sharded axis, the length of a part with padding, and the number of copies of each part."""
    place = _place(variable)
    lengths = dict(place.sharding.mesh.shape)
    split = {axis: lengths[name] for axis, name in enumerate(place.sharding.spec) if name is not None}
    split = {axis: number for axis, number in split.items() if number > 1}
    if len(split) != 1:
        return None
    ((axis, number),) = split.items()
    return axis, place.shape[axis] // number, place.sharding.mesh.size // number
