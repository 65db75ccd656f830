"""`JaxCore`: the mesh over all devices, and the placement of state and batches on it.

The step is one global program, and XLA splits its rows, so nothing is computed per replica. kdist only places
data: state is replicated or sharded, and batches are split by rows.
"""

from __future__ import annotations

import collections
import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kdist import keras_hooks, tracing
from kdist.arrays.rows import flatten, is_ragged, is_scipy, is_tf_sparse, map_leaves, to_dense, torch_to_numpy
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches, Runtime
from kdist.backends.jax import storage
from kdist.backends.jax.collectives import BATCH_AXIS
from kdist.backends.jax.devices import find_devices, local_devices
from kdist.backends.jax.dispatched import note_dispatched
from kdist.backends.jax.rendezvous import without_chatter
from kdist.backends.jax.storage import Storage, arranged, is_divided
from kdist.backends.jax.workers import all_devices
from kdist.backends.workers import Workers, in_parts
from kdist.communication.shared_memory import SharedMemory
from kdist.control.joining import closed_error
from kdist.errors import DatasetError
from kdist.topology import Topology

if TYPE_CHECKING:
    from typing import TypeGuard

    from kdist.arrays.types import Structure, T

_SMALL_BYTES = 1 << 20
_MOST_EVEN = 64  # arrays of the last batches


class JaxCore(Runtime):
    """The mesh over the devices of all workers, in worker order. Each replica is a device of this mesh."""

    sees_all_rows = True

    exchanges_in_programs = True

    needs_equal_shapes = True

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.local_devices = find_devices(self.devices)
        # The device for cross-replica computation. Variables that are not sharded are also created there.
        (self.holder,) = find_devices(topology.parameter_devices[:1])
        self._even: collections.deque[weakref.ref[jax.Array]] = collections.deque(maxlen=_MOST_EVEN)
        self._copies: dict[
            jax.Device, Callable[[list[jax.Array]], list[jax.Array]]
        ] = {}  # a program per device
        everyone = np.array(all_devices(group, self.local_devices))
        sharded = topology.sharded
        if sharded is None:
            self.mesh, batch_axis = Mesh(everyone, (BATCH_AXIS,)), BATCH_AXIS
        else:
            shape = sharded.mesh_shape(len(everyone))
            self.mesh, batch_axis = Mesh(everyone.reshape(shape), tuple(sharded.axes)), sharded.batch_axis
        self.storage = None if sharded is None else Storage(self, sharded)
        # One device needs no mesh: a step takes NumPy arrays and returns plain arrays, as plain Keras's does.
        self.is_single = self.num_replicas == 1 and sharded is None and not topology.is_central
        self.can_fuse = self.num_workers > 1 and sharded is None and not topology.is_central
        is_plain = self.is_single or (self.can_fuse and len(self.local_devices) == 1)
        self._takes_host_arrays = is_plain and self.holder.platform == "cpu"
        # NCCL sends many small tensors as one.
        self.fuses_sums = self.can_fuse and self.holder.platform == "cpu"
        """Whether steps sum with `over_rows`. With compression, they do whenever they can."""
        is_one = len(self.local_devices) == 1  # each device would add to the sum of its worker
        self.memory: SharedMemory | None = getattr(group, "memory", None) if is_one else None
        """The shared memory in which `over_rows` sums. Another strategy may have connected it."""
        self.replicated: NamedSharding | SingleDeviceSharding = NamedSharding(self.mesh, PartitionSpec())
        if self.is_single:
            self.replicated = SingleDeviceSharding(self.holder)
        self.by_rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        self.by_rows_of_steps = NamedSharding(self.mesh, PartitionSpec(None, self.mesh.axis_names))
        self.by_batch = NamedSharding(self.mesh, PartitionSpec(batch_axis))
        local_mesh = Mesh(np.array(self.local_devices), (BATCH_AXIS,))
        self._local_replicated = NamedSharding(local_mesh, PartitionSpec())
        # Concurrent executions on several CPU devices can exhaust XLA's threads, so that each waits for the
        # others' collectives. PJRT_NPROC makes this unlikely. One execution at a time rules it out.
        self._one_at_a_time = len(self.devices) > 1 and self.local_devices[0].platform == "cpu"
        if self.num_workers > 1:
            with without_chatter(), group.working():
                try:
                    self.broadcast([np.zeros(1, np.float32)])  # detects a broken connection
                except jax.errors.JaxRuntimeError as error:
                    if (explained := group.explain_failure(error)) is not error:
                        raise explained from error
                    raise closed_error(f"worker {self.worker_index}", error) from error

    def note_even(self, batch: Structure) -> None:
        """Records the arrays of a batch, whose shapes are equal on all workers, by weak references."""
        self._even.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array))

    def is_even(self, array: jax.Array | np.ndarray) -> bool:
        """Returns whether an array is known to have the same shape on all workers, without communication."""
        return not array.shape or any(known() is array for known in self._even)

    @property
    def communication(self) -> str:
        by_kind = {"cpu": "gloo", "gpu": "nccl"}
        return by_kind.get(self.devices[0].partition(":")[0], "xla") if self.num_workers > 1 else ""

    @property
    def all_devices(self) -> list[str]:
        """The devices of the mesh, in mesh order."""
        return [f"{device.platform}:{device.id}" for device in self.mesh.devices.flat]

    def scope(self) -> AbstractContextManager[object]:
        """Creates variables on the device that holds them, or on the host if they may be sharded."""
        hosts = [] if self.storage is None else local_devices("cpu")
        device = self.holder if self.holder.platform == "cpu" else (*hosts, self.holder)[0]
        if device == jax.local_devices()[0]:
            return contextlib.nullcontext()  # already JAX's default; setting it would cause retracing
        return jax.default_device(device)

    @property
    def can_exchange(self) -> bool:
        return not isinstance(jax.numpy.zeros(()), jax.core.Tracer)

    def to_holder(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            part if isinstance(part, jax.core.Tracer) else jax.device_put(part, self.holder) for part in parts
        ]

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        if self.num_workers > 1:
            # Sharded variables have had the chief's values since they were sharded.
            whole_ones = [v for v in variables if not is_divided(v)]
            for some in in_parts(whole_ones, lambda variable: math.prod(variable.shape) * 4):
                # A new variable may hold the value of a sharded one, as in `ScheduleFreeAdamW`.
                values = self.broadcast([storage.whole(variable.value, self.mesh) for variable in some])
                for variable, value in zip(some, values, strict=True):
                    variable.assign(value if self.storage is None else np.asarray(value))
        if self.storage is not None:
            self.storage.take(variables)

    def place_state(self, values: T) -> T:
        """Copies process-local arrays to all devices.

        All workers must pass equal values, because nothing is sent between workers. The result shares no
        memory with `values`, so it can be donated while variables still use `values`.
        """
        # A replicated device_put would share the first device's buffer even with may_alias=False.
        return self._replicate(jax.device_put(values, self.holder, may_alias=False))

    def place(self, parts: Sequence[Structure]) -> list[Structure]:
        def ready(leaf: object) -> jax.Array | np.ndarray | sparse.BCOO | None:
            array = _as_array(leaf)
            # JAX shares aligned memory even with may_alias=False, but a pipeline may overwrite it.
            return np.array(array) if isinstance(array, np.ndarray) else array

        placed = []
        for part, device in zip(parts, self.local_devices, strict=True):
            leaves = [] if part is None else [ready(leaf) for leaf in flatten(part)]
            moved = iter(self.put([leaf for leaf in leaves if _is_number(leaf)], device))
            done = iter([next(moved) if _is_number(leaf) else leaf for leaf in leaves])

            def replace(_: object, done: Iterator[object] = done) -> object:
                return next(done)

            placed.append(None if part is None else map_leaves(replace, part))
        return placed

    def put(self, arrays: list[jax.Array | np.ndarray], device: jax.Device) -> list[jax.Array]:
        is_small = sum(array.nbytes for array in arrays) <= _SMALL_BYTES
        if device.platform != "cpu" or not is_small or any(isinstance(array, jax.Array) for array in arrays):
            return jax.device_put(arrays, device, may_alias=False)
        # A program takes a tenth of the time of device_put, which costs 0.1 ms per array.
        if device not in self._copies:
            self._copies[device] = jax.jit(lambda arrays: arrays, out_shardings=SingleDeviceSharding(device))
        return self._copies[device](arrays)

    def place_for_step(self, parts: Sequence[Structure]) -> list[Structure]:
        """Places the parts of a batch. With one CPU device per worker, NumPy arrays stay until the step."""
        if not self._takes_host_arrays:
            return self.place(parts)

        def placed(leaf: object) -> object:
            is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
            return leaf if is_array else self.place([leaf])[0]

        return [map_leaves(placed, part) for part in parts]

    def place_eagerly(self, data: Structure) -> Structure:
        """Returns data for an eager step, on the first device, or as NumPy arrays for sharded variables."""
        if self.storage is None:
            return jax.device_put(data, self.holder)
        return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, data)

    def show_eager(self, outputs: Structure) -> Structure:
        """Returns the results of an eager step as arrays of this worker."""
        if self.storage is None:
            return outputs
        return jax.tree.map(lambda leaf: arranged(leaf, self.replicated), outputs)

    def join_parts(self, batch: ReplicaBatches) -> Structure:
        """Returns the global batch as arrays over the mesh; nothing is sent between devices.

        Each device has its rows or all rows. If it has all rows, `divide` splits them inside the program.
        """
        if self.is_single:
            return batch.parts[0]
        is_whole = have_all_rows(batch.split)
        sharding = self.replicated if is_whole else self.by_rows
        parts = batch.parts
        if self._takes_host_arrays and any(isinstance(leaf, np.ndarray) for leaf in flatten(parts[0])):
            parts = self.place(parts)

        def join(*leaves: jax.Array | None) -> jax.Array | None:
            if leaves[0] is None:
                return None
            if isinstance(leaves[0], sparse.BCOO):  # its index arrays have no rows to split
                if is_whole:
                    # `place` leaves sparse arrays on JAX's default device.
                    return self._replicate(jax.device_put(leaves[0], self.local_devices[0]))
                raise DatasetError(
                    "Cannot use a sparse array as the batch of one replica: JAX cannot join sparse arrays.",
                    received={"shape": tuple(leaves[0].shape)},
                    hint="Use `experimental_distribute_dataset` with AutoShardPolicy.DATA, or use dense arrays.",
                )
            shape = (batch.split[-1][1], *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

        return map_leaves(join, parts[0]) if len(parts) == 1 else keras.tree.map_structure(join, *parts)

    def join_values(self, values: Sequence[Sequence[jax.Array | np.ndarray]]) -> list[jax.Array]:
        """Concatenates the values of all replicas by rows into arrays over the mesh; scalars become rows.

        Each value consists of one array per local replica, with equal shapes.
        """
        placed = []
        for parts in values:
            shape = parts[0].shape
            if self.num_replicas == 1:
                placed.append(jax.device_put(parts[0], self.replicated))
                continue
            rows = parts if shape else [part.reshape(1) for part in parts]
            local = [jax.device_put(p, d) for p, d in zip(rows, self.local_devices, strict=True)]
            whole = (local[0].shape[0] * self.num_replicas, *shape[1:])
            placed.append(jax.make_array_from_single_device_arrays(whole, self.by_rows, local))
        return placed

    def divide(self, batch: Structure) -> Structure:
        """Makes XLA split rows over the replicas inside a program, even if the number is not divisible.

        XLA pads the last part and masks the padding in every reduction, so the results do not change.
        """

        if self.is_single:
            return batch

        def constrain(leaf: object) -> object:
            if not isinstance(leaf, jax.Array) or leaf.ndim == 0 or not self._divides(leaf.shape[0]):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.by_batch)

        return keras.tree.map_structure(constrain, batch)

    def _divides(self, num_rows: int) -> bool:
        """Returns whether a program splits this number of rows.

        If the mesh has several axes, the rows must divide evenly. With padding, XLA's partitioner counts some
        rows of a scatter twice (the gradient of an embedding, a confusion matrix; jaxlib 0.10.2).
        """
        length = self.mesh.shape[self.by_batch.spec[0]]
        return num_rows >= length and (num_rows % length == 0 or length == self.num_replicas)

    def place_variables(self, variables: Sequence[keras.Variable]) -> list[jax.Array]:
        """Returns the values of variables on all devices. Sharded variables provide their own arrays."""
        values = [keras_hooks.native_value(variable) for variable in variables]
        whole_ones = [i for i, variable in enumerate(variables) if not is_divided(variable)]
        placed = self.place_state([values[i] for i in whole_ones])
        for i, value in zip(whole_ones, placed, strict=True):
            values[i] = value
        return values

    def shardings(self, variables: Sequence[keras.Variable]) -> list[NamedSharding] | None:
        """Returns the output shardings of variables for a program, or `None` if XLA may choose."""
        return None if self.storage is None else [self.storage.sharding(variable) for variable in variables]

    def show_variables(
        self, variables: Sequence[keras.Variable], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the values to store in variables after a program; copies only to a central device."""
        if self.storage is None:
            return list(self.show(list(values)))
        return [
            arranged(value, self.storage.sharding(variable))
            for variable, value in zip(variables, values, strict=True)
        ]

    kept_whole = storage.kept_whole
    local_parts = staticmethod(storage.local_parts)

    def local_values(self, variable: keras.Variable) -> Sequence[jax.Array | np.ndarray]:
        return [np.asarray(variable)] if is_divided(variable) else [variable.value]

    def show(self, values: T) -> T:
        """Returns replicated arrays as arrays of one local device, copied only to a central device."""
        if self.is_single:
            return values
        local = jax.tree.map(lambda value: value.addressable_data(0), values)
        return jax.device_put(local, self.holder) if self.topology.is_central else local

    def broadcast(self, values: Sequence[jax.Array | np.ndarray]) -> list[jax.Array]:
        """Returns worker 0's arrays on this worker's first device. All workers must call this method."""
        hosts = [np.asarray(value) for value in values]
        data = b"".join(host.tobytes() for host in hosts)
        words = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
        # One row per device. A program that returns the first row on all devices broadcasts it.
        (rows,) = self.join_values([[words[None]] * len(self.devices)])
        first = jax.jit(lambda rows: rows[0], out_shardings=self.replicated)(rows)
        data = np.asarray(first.addressable_data(0)).tobytes()
        chief, start = [], 0
        for host in hosts:
            part = np.frombuffer(data, host.dtype, host.size, start).reshape(host.shape)
            chief.append(jax.device_put(part, self.holder, may_alias=False))
            start += host.nbytes
        return chief

    def throttle(self, values: Structure) -> None:
        """Waits for the results of a step if the next step could interfere with it."""
        note_dispatched(values, self.num_workers)
        if self._one_at_a_time:
            with tracing.span("until ready", "step"):
                jax.block_until_ready(values)

    def _replicate(self, values: T) -> T:
        """Copies a tree of process-local arrays, equal on all workers, to all devices."""

        def over_workers(local: jax.Array) -> jax.Array:
            shards = [shard.data for shard in local.addressable_shards]
            return jax.make_array_from_single_device_arrays(local.shape, self.replicated, shards)

        if self.local_devices == [self.holder]:  # a transfer to the same device also takes 0.1 ms per array
            return jax.tree.map(over_workers, values)
        copies = jax.device_put(values, self._local_replicated)
        return jax.tree.map(over_workers, copies) if self.num_workers > 1 else copies


def _is_number(array: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Returns whether an array can be on a device: for example, an array of texts cannot."""
    return isinstance(array, jax.Array) or (isinstance(array, np.ndarray) and array.dtype.kind in "biufcV")


def _as_array(leaf: object) -> jax.Array | np.ndarray | sparse.BCOO | None:
    if leaf is None or isinstance(leaf, (np.ndarray, jax.Array, sparse.BCOO)):
        return leaf
    if is_tf_sparse(leaf):
        return sparse.BCOO((leaf.values.numpy(), leaf.indices.numpy()), shape=tuple(leaf.shape))
    if is_scipy(leaf):
        return sparse.BCOO.from_scipy_sparse(leaf)
    if hasattr(leaf, "detach"):  # a PyTorch tensor
        return torch_to_numpy(leaf)
    return np.asarray(to_dense(leaf) if is_ragged(leaf) else leaf)
