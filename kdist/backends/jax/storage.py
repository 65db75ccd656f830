"""Variables that are divided over a mesh: how they are held, and what it takes to read them.

A divided variable holds one array over all devices of all workers, each of which has its part. One that no layout
divides is an array of this process, as under the other strategies, but an uncommitted one: JAX lets it meet arrays over
the mesh as well as those of one device.

JAX only divides an axis into equal parts. A variable with another axis is padded with zeros where it is stored, between
programs. Programs remove the padding first and add it last, which moves nothing between devices: inside a program, XLA
divides any axis. Whoever reads or assigns the variable sees its own shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdist import keras_hooks
from kdist.backends.aggregation import is_on_read
from kdist.backends.messages import meet_to_read
from kdist.backends.variable_table import VariableTable
from kdist.topology import Sharded

_EACH_DIVIDES = ("int8", "uint8")  # quantized weights; other integers are counters and seeds


class Place(NamedTuple):
    """Where a variable is: how it is divided, the runtime whose workers hold the parts, and its shape with padding."""

    runtime: Any
    sharding: NamedSharding
    shape: tuple[int, ...]


_places: VariableTable[Place] = VariableTable()
_kept: VariableTable[np.ndarray] = VariableTable()


class Storage:
    """The variables of one runtime, divided as a topology says.

    Args:
        runtime: It has the `mesh`.
        sharded: The topology's storage.
    """

    def __init__(self, runtime: Any, sharded: Sharded) -> None:
        self._runtime = runtime
        self._layout = sharded.layout
        self._lengths: dict[str, int] = dict(runtime.mesh.shape)

    def take(self, variables: Sequence[Any]) -> None:
        """Divides those variables that were not taken yet: they are whole on every worker, with equal values.

        Raises:
            InvalidArgumentError: A layout does not divide its variable.
        """
        variables = [variable for variable in variables if _places.get(variable) is None]
        shardings = [self._sharding(variable) for variable in variables]  # all errors first
        for variable, sharding in zip(variables, shardings, strict=True):
            _places[variable] = Place(self._runtime, sharding, _padded_shape(variable.shape, sharding))
            value = assigned_value(variable, keras_hooks.native_value(variable))
            keras_hooks.set_native_value(variable, value)

    def sharding(self, variable: Any) -> NamedSharding:
        """Returns how a variable is held in a program."""
        place = _places.get(variable)
        return self._runtime.replicated if place is None else place.sharding

    @contextlib.contextmanager
    def outputs(self) -> Iterator[None]:
        """Within this, a step is traced: what layers return is divided where the layout says so."""
        if not hasattr(self._layout, "of_output"):
            yield
            return
        keras.distribution.set_distribution(self)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    def get_tensor_layout(self, path: str) -> NamedSharding | None:
        """What Keras's layers ask a distribution for."""
        axes = self._layout.of_output(path)  # type: ignore[attr-defined]
        return None if axes is None else NamedSharding(self._runtime.mesh, PartitionSpec(*axes))

    def _sharding(self, variable: Any) -> NamedSharding:
        axes: Sequence[str | None] = ()
        if _may_be_divided(variable):
            path = keras_hooks.owner_path(variable)
            axes = self._layout(path, tuple(variable.shape), self._lengths)
        return NamedSharding(self._runtime.mesh, PartitionSpec(*axes))


def _may_be_divided(variable: Any) -> bool:
    """Not what metrics count, nor counters and seeds: they are small, and read by single workers."""
    if is_on_read(variable) or variable.aggregation == "sum" or not variable.shape:
        return False
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return keras.backend.is_float_dtype(dtype) or dtype in _EACH_DIVIDES


def is_divided(variable: Any) -> bool:
    """Says whether a variable's value is an array over several devices."""
    place = _places.get(variable)
    return place is not None and not place.sharding.is_fully_replicated


def arranged(value: Any, sharding: NamedSharding) -> Any:
    """Returns a value as a variable of this sharding holds it; all workers pass equal ones."""
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
    # A copy of each part: JAX shows memory that is aligned as it wants, here that of the whole.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def _uncommitted(value: Any) -> Any:
    """The same array, which JAX may bring to where the others of a computation are; there is no public way."""
    from jax._src.array import ArrayImpl

    if not isinstance(value, ArrayImpl) or not value._committed:
        return value
    return ArrayImpl(value.aval, value.sharding, value._arrays, committed=False)


def _padded_shape(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """Returns a shape whose axes the mesh divides."""
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    parts = [1 if name is None else sharding.mesh.shape[name] for name in spec]
    return tuple(-(-length // number) * number for length, number in zip(shape, parts, strict=True))


def _place(variable: Any) -> Place:
    place = _places.get(variable)
    assert place is not None
    return place


def is_padded(variable: Any) -> bool:
    """Says whether a variable's native value has rows or columns that the variable does not have."""
    place = _places.get(variable)
    return place is not None and place.shape != tuple(variable.shape)


def stored(variable: Any, value: Any) -> Any:
    """Returns a value of a variable as it is stored: with padding, if it has any."""
    if not is_padded(variable):
        return value
    widths = [(0, length - own) for length, own in zip(_place(variable).shape, value.shape, strict=True)]
    return (jax.numpy if isinstance(value, jax.Array) else np).pad(value, widths)


def in_own_shape(variable: Any, value: Any) -> Any:
    """In a trace: returns a stored value without padding."""
    return jax.lax.slice(value, [0] * value.ndim, variable.shape) if is_padded(variable) else value


def divided(variable: Any, value: Any) -> Any:
    """In the program of a step: as `in_own_shape`, and XLA does not gather the value first."""
    own = in_own_shape(variable, value)
    return own if own is value else jax.lax.with_sharding_constraint(own, _place(variable).sharding)


def assigned_value(variable: Any, value: Any) -> Any:
    """Called with what is assigned to a variable outside of replicas: keeps it divided as it was."""
    place = _places.get(variable)
    if place is None:
        return value
    if is_padded(variable) and not isinstance(value, jax.core.Tracer):
        value = stored(variable, whole(value, place.sharding.mesh))
    return arranged(value, place.sharding)


def whole(value: Any, mesh: Mesh) -> np.ndarray:
    """Returns all of an array. All workers must call it where it is divided over them."""
    if not value.is_fully_addressable and not value.is_fully_replicated:
        value = jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    return np.asarray(value)


def read(variable: Any) -> np.ndarray | None:
    """Returns a value that is divided over workers, who must all read it, or is padded; `None` for other variables."""
    kept = _kept.get(variable)
    if kept is not None or not (is_over_workers(variable) or is_padded(variable)):
        return kept
    runtime = _place(variable).runtime
    if is_over_workers(variable):
        meet_to_read(runtime, [variable])
    with runtime.engine_errors(), runtime.group.working():
        return whole_of(runtime, variable)


def shown(variable: Any, value: Any) -> Any:
    """Returns a value without padding: as an array of this process, or of a trace."""
    if not is_padded(variable) or isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        return in_own_shape(variable, value)
    return jax.numpy.asarray(read(variable), value.dtype)


def whole_of(runtime: Any, variable: Any) -> np.ndarray:
    """Returns all of a divided variable. All workers must call it where it is divided over them."""
    found = whole(keras_hooks.native_value(variable), runtime.mesh)
    return found[tuple(slice(length) for length in variable.shape)]


def is_over_workers(variable: Any) -> bool:
    """Says whether other workers hold parts of a variable that this one lacks."""
    return is_divided(variable) and not keras_hooks.native_value(variable).is_fully_addressable


@contextlib.contextmanager
def kept_whole(runtime: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Within this, this worker reads variables that are divided over workers by itself. All workers must enter it."""
    divided = [variable for variable in variables if is_over_workers(variable)]
    if not divided:
        yield
        return
    meet_to_read(runtime, divided)
    try:
        with runtime.engine_errors(), runtime.group.working():
            for variable in divided:
                _kept[variable] = whole_of(runtime, variable)
        yield
    finally:
        for variable in divided:
            _kept.pop(variable)
