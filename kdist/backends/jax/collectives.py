"""Collectives of replicas in one program: sums, gathered rows, and functions for all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import keras
import numpy as np
from jax.experimental.buffer_callback import Buffer, ExecutionContext, buffer_callback
from jax.extend.core import get_opaque_trace_state

from kdist.backends.jax.dispatched import state_of
from kdist.backends.jax.row_rules import NoRule
from kdist.communication.shared_memory import SharedMemory
from kdist.values import DistributedValues, PerReplica

if TYPE_CHECKING:
    from kdist.arrays.types import R, T

BATCH_AXIS = "batch"
# Up to this size, in bytes, copies take less time than a Python object per array.
_ONE_ARRAY = 256 << 10


class Collectives(Protocol):
    """The operations that connect the replicas of a user function."""

    replica_id: int | jax.Array
    local_index: int | jax.Array

    def sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Sums each tensor over all replicas."""

    def gather(self, rows: jax.Array) -> tuple[jax.Array, int | jax.Array]:
        """Returns the rows of all replicas, and the index of this replica's first row."""

    def merge(self, function: Callable[[T], R], values: T) -> R:
        """Calls a function with the values of all local replicas, and returns this replica's component."""


class MeshCollectives:
    """The collectives of a program that all devices run with equal tensor shapes. XLA sums without `in_memory`."""

    def __init__(self, runtime: Any, in_memory: SumsInMemory | None = None) -> None:
        self._memory: SharedMemory | None = runtime.memory
        self._in_memory = in_memory
        self.fits_memory = self._memory is not None and runtime.can_fuse  # XLA gathers sharded variables
        """Whether `SumsInMemory` can compute everything that the program has communicated so far."""
        self._trace = get_opaque_trace_state()
        self._num_replicas = runtime.num_replicas
        self._num_local = len(runtime.devices)
        self._axes: tuple[str, ...] = runtime.mesh.axis_names
        self._compression: str | None = runtime.compression
        alone = self._num_replicas == 1
        self.replica_id: int | jax.Array = 0 if alone else jax.lax.axis_index(self._axes)
        self.local_index: int | jax.Array = 0 if self._num_local == 1 else self.replica_id % self._num_local

    def sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        if self._num_replicas == 1:
            return list(tensors)
        totals = self._sum(tensors)
        # Without the cast, a sum of booleans would be a number.
        return [total.astype(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    def _sum(self, tensors: Sequence[jax.Array]) -> Sequence[jax.Array]:
        # A loop, a branch or the derivative of a function has another trace, which cannot pass on the turn.
        is_outer = get_opaque_trace_state() == self._trace
        memory = self._memory
        can_sum = memory is not None and all(memory.can_sum(tensor.dtype) for tensor in tensors)
        self._require_xla_unless(is_outer and can_sum)
        if self._in_memory is not None:
            return [self._in_memory([tensor])[0] for tensor in tensors]
        if self._compression is None:
            return jax.lax.psum(tuple(tensors), self._axes)
        return [
            sum_of_16_bits(tensor, self._axes, self._num_replicas)
            if tensor.dtype.name == self._compression
            else jax.lax.psum(tensor, self._axes)
            for tensor in tensors
        ]

    def gather(self, rows: jax.Array) -> tuple[jax.Array, int | jax.Array]:
        """Returns the rows of all devices. Their numbers are equal, because all devices run one program."""
        if self._num_replicas == 1:
            return rows, 0
        self._require_xla_unless(False)
        return jax.lax.all_gather(rows, self._axes, tiled=True), self.replica_id * rows.shape[0]

    def _require_xla_unless(self, fits_memory: bool) -> None:
        """Raises `NoRule` in a program that sums in memory, because XLA's collectives would have no order with it."""
        self.fits_memory &= fits_memory
        if self._in_memory is not None and not fits_memory:
            raise NoRule("a collective that shared memory cannot compute")

    def merge(self, function: Callable[[T], R], values: T) -> R:
        """Calls a function on every device with the values of all devices of its worker."""
        if self._num_local == 1:
            return function(values)
        first = self.replica_id - self.local_index

        def join(leaf: object) -> object:
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                return leaf
            everyone = jax.lax.all_gather(leaf, self._axes)
            return PerReplica([everyone[first + i] for i in range(self._num_local)])

        def choose(leaf: object) -> object:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return jax.numpy.stack(leaf.values)[self.local_index]

        result = function(keras.tree.map_structure(join, values))
        return keras.tree.map_structure(choose, result)


def sum_of_16_bits(tensor: jax.Array, axes: str | tuple[str, ...], number: int) -> jax.Array:
    """Sums a tensor of a 16-bit dtype over a number of devices. Each device adds a part for all of them.

    The bits travel as integers, because XLA sums bfloat16 between CPUs as float32.
    """
    if not tensor.size:
        return tensor
    lax, dtype, size = jax.lax, tensor.dtype, -(-tensor.size // number)
    flat = jax.numpy.pad(tensor.reshape(-1), (0, size * number - tensor.size))
    bits = lax.bitcast_convert_type(flat, np.uint16).reshape(number, size)
    parts = lax.bitcast_convert_type(lax.all_to_all(bits, axes, 0, 0), dtype)
    total = parts.astype(np.float32).sum(0).astype(dtype)
    bits = lax.all_gather(lax.bitcast_convert_type(total, np.uint16), axes, tiled=True)
    return lax.bitcast_convert_type(bits[: tensor.size], dtype).reshape(tensor.shape)


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates flat arrays of one dtype.

    On CPUs, XLA computes the gradients inside a `concatenate`, element by element, which takes ten times as long.
    """
    flat = jax.numpy.zeros(sum(array.size for array in arrays), arrays[0].dtype)
    start = 0
    for array in arrays:
        flat = jax.lax.dynamic_update_slice(flat, array, (start,))
        start += array.size
    return flat


def next_turn(runtime: Any) -> jax.Array | np.ndarray:
    """Returns the array with which a program starts its sums in shared memory; see `SumsInMemory`."""
    memory = runtime.memory
    if memory is None:
        return np.zeros((), np.int32)
    if memory.turn is None or state_of(memory.turn) in ("failed", "reused"):
        memory.turn = runtime.place_state(np.int32(0))
    return memory.turn


class SumsOfXla:
    """Sums arrays of one dtype as one flat array, with an all-reduce of XLA."""

    def __init__(self, axis: str, number: int, compression: str | None) -> None:
        self._axis, self._number, self._compression = axis, number, compression

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return as_one_array(self._sum, arrays)

    def _sum(self, flat: jax.Array) -> jax.Array:
        is_small = flat.dtype.name == self._compression
        return sum_of_16_bits(flat, self._axis, self._number) if is_small else jax.lax.psum(flat, self._axis)


def as_one_array(function: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Applies a function to arrays of one dtype as one flat array."""
    flat = function(concatenated([jax.numpy.ravel(array) for array in arrays]))
    parts = jax.numpy.split(flat, np.cumsum([array.size for array in arrays])[:-1].tolist())
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


class SumsInMemory:
    """Sums arrays of one dtype in shared memory, in a function that the program calls.

    Each sum takes `turn` from the previous one, so that the order is the same on all workers.

    Source: https://docs.jax.dev/en/latest/jax.experimental.buffer_callback.html
    """

    def __init__(self, memory: SharedMemory, turn: jax.Array) -> None:
        self._memory = memory
        self.turn = turn

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if not self._memory.can_sum(arrays[0].dtype):
            raise NoRule(f"a sum of dtype {arrays[0].dtype}")
        if len(arrays) > 1 and sum(array.size * array.dtype.itemsize for array in arrays) <= _ONE_ARRAY:
            return as_one_array(lambda flat: self._call([flat])[0], arrays)
        return self._call(arrays)

    def _call(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (self.turn, *arrays)]
        self.turn, *summed = buffer_callback(self._sum, shapes)(self.turn, *arrays)
        return summed

    def _sum(self, context: ExecutionContext, results: list[Buffer], turn: Buffer, *arrays: Buffer) -> None:
        flat = [np.asarray(buffer).reshape(-1) for buffer in arrays]
        self._memory.sum_all(flat, [np.asarray(buffer).reshape(-1) for buffer in results[1:]])
        np.asarray(results[0])[...] = 0
