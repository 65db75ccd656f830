"""`JaxCore`: the mesh over all devices, and the placing of state and batches on it.

Nothing is computed per replica: the step is one global program, and XLA divides its rows. So "placing" is all there
is: state is replicated, batches are split by rows.
"""

from __future__ import annotations

import collections
import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kdist import keras_hooks, tracing
from kdist.arrays.rows import is_ragged, is_scipy, is_tf_sparse, to_dense, torch_to_numpy
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches, Runtime
from kdist.backends.jax import storage
from kdist.backends.jax.collectives import BATCH_AXIS
from kdist.backends.jax.devices import find_devices, local_devices
from kdist.backends.jax.dispatched import note_dispatched
from kdist.backends.jax.meeting import without_chatter
from kdist.backends.jax.storage import Storage, arranged, is_divided
from kdist.backends.jax.workers import all_devices
from kdist.backends.joining import closed_error
from kdist.backends.workers import Workers
from kdist.errors import DatasetError
from kdist.topology import Central, Sharded, Topology

_MOST_BYTES = 64 << 20
_MOST_EVEN = 64  # arrays of the last batches


class JaxCore(Runtime):
    """The devices of all workers as one axis, those of worker 0 first. A replica is a device of this mesh."""

    sees_all_rows = True

    exchanges_in_programs = True

    needs_equal_shapes = True

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.local_devices = find_devices(self.devices)
        # Where what speaks for all replicas computes; variables are created there too, but for those that are divided.
        (self.holder,) = find_devices(topology.parameter_devices[:1])
        self.is_central = isinstance(topology.storage, Central)
        self._even: collections.deque[weakref.ref[jax.Array]] = collections.deque(maxlen=_MOST_EVEN)
        everyone = np.array(all_devices(group, self.local_devices))
        sharded = topology.storage if isinstance(topology.storage, Sharded) else None
        if sharded is None:
            self.mesh, batch_axis = Mesh(everyone, (BATCH_AXIS,)), BATCH_AXIS
        else:
            shape = sharded.mesh_shape(len(everyone))
            self.mesh, batch_axis = Mesh(everyone.reshape(shape), tuple(sharded.axes)), sharded.batch_axis
        self.storage = None if sharded is None else Storage(self, sharded)
        # One device needs no mesh: a step takes NumPy arrays and returns plain arrays, as plain Keras's does.
        self._is_single = self.num_replicas == 1 and sharded is None and not self.is_central
        self._takes_host_arrays = self._is_single and self.holder.platform == "cpu"
        self.replicated: Any = NamedSharding(self.mesh, PartitionSpec())
        if self._is_single:
            self.replicated = SingleDeviceSharding(self.holder)
        self.by_rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        self.by_batch = NamedSharding(self.mesh, PartitionSpec(batch_axis))
        local_mesh = Mesh(np.array(self.local_devices), (BATCH_AXIS,))
        self._local_replicated = NamedSharding(local_mesh, PartitionSpec())
        # Several executions in flight on several CPU devices can exhaust XLA's threads, each waiting for the
        # other's collectives. PJRT_NPROC makes this unlikely, one execution at a time makes it impossible.
        self._one_at_a_time = len(self.devices) > 1 and self.local_devices[0].platform == "cpu"
        if self.num_workers > 1:
            with without_chatter(), group.working():
                try:
                    self.broadcast([np.zeros(1, np.float32)])  # a broken connection shows here
                except jax.errors.JaxRuntimeError as error:
                    if (explained := group.explain_failure(error)) is not error:
                        raise explained from error
                    raise closed_error(f"worker {self.worker_index}", error) from error

    def note_even(self, batch: Any) -> None:
        """Keeps the arrays of a batch whose shapes all workers know to be equal, as long as somebody uses them."""
        self._even.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array))

    def is_even(self, array: Any) -> bool:
        """Says whether an array has the same shape on all workers, as far as this is known without a message."""
        return not array.shape or any(known() is array for known in self._even)

    @property
    def communication(self) -> str:
        """By what devices talk is JAX's choice, by their kind."""
        by_kind = {"cpu": "gloo", "gpu": "nccl"}
        return by_kind.get(self.devices[0].partition(":")[0], "xla") if self.num_workers > 1 else ""

    @property
    def all_devices(self) -> list[str]:
        """The devices of the mesh, in its order."""
        return [f"{device.platform}:{device.id}" for device in self.mesh.devices.flat]

    def scope(self) -> AbstractContextManager[Any]:
        """Creates variables on the device that holds them; those that no device need hold whole, on the host."""
        hosts = [] if self.storage is None else local_devices("cpu")
        device = self.holder if self.holder.platform == "cpu" else (*hosts, self.holder)[0]
        if device == jax.local_devices()[0]:
            return contextlib.nullcontext()  # JAX's default anyway; setting it would trace functions anew
        return jax.default_device(device)

    @property
    def can_exchange(self) -> bool:
        """Not in a program, which runs later."""
        return not isinstance(jax.numpy.zeros(()), jax.core.Tracer)

    def to_holder(self, parts: Sequence[Any]) -> list[Any]:
        """Returns tensors on the device that holds variables."""
        return [
            part if isinstance(part, jax.core.Tracer) else jax.device_put(part, self.holder) for part in parts
        ]

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives every worker the values that the chief has, and divides what is new."""
        if self.num_workers > 1:
            # A divided variable has had the chief's value since it was divided.
            for some in _in_parts([v for v in variables if not is_divided(v)]):
                values = self.broadcast([variable.value for variable in some])
                for variable, value in zip(some, values, strict=True):
                    variable.assign(value if self.storage is None else np.asarray(value))
        if self.storage is not None:
            self.storage.take(variables)

    def place_state(self, values: Any) -> Any:
        """Copies process-local arrays to all devices.

        Every worker passes equal values; nothing is sent between workers. The result shares no memory with
        `values`, so it may be donated while variables still show them.
        """
        # A replicated device_put would share the first device's buffer even with may_alias=False.
        return self._replicate(jax.device_put(values, self.holder, may_alias=False))

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Copies one batch for each local replica to its device."""

        def put(leaf: Any, device: Any) -> Any:
            array = _as_array(leaf)
            if array is None or isinstance(array, sparse.BCOO):
                return array
            is_number = isinstance(array, jax.Array) or array.dtype.kind in "biufcV"
            if isinstance(array, np.ndarray):
                # Whatever may_alias says, JAX shows memory that is aligned as it wants; a pipeline may fill it again.
                array = np.array(array)
            return jax.device_put(array, device, may_alias=False) if is_number else array

        return [
            None if part is None else keras.tree.map_structure(lambda leaf, d=device: put(leaf, d), part)
            for part, device in zip(parts, self.local_devices, strict=True)
        ]

    def place_for_step(self, parts: Sequence[Any]) -> list[Any]:
        """Places the parts of a batch. With a single CPU device, NumPy arrays stay: the program takes them."""
        if not self._takes_host_arrays:
            return self.place(parts)

        def placed(leaf: Any) -> Any:
            is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
            return leaf if is_array else self.place([leaf])[0]

        return [keras.tree.map_structure(placed, part) for part in parts]

    def place_eagerly(self, data: Any) -> Any:
        """Returns data of this worker's for a step outside of any program, on its first device, or beside any array."""
        if self.storage is None:
            return jax.device_put(data, self.holder)
        return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, data)

    def show_eager(self, outputs: Any) -> Any:
        """Returns what such a step has computed as arrays of this worker."""
        if self.storage is None:
            return outputs
        return jax.tree.map(lambda leaf: arranged(leaf, self.replicated), outputs)

    def join_parts(self, batch: ReplicaBatches) -> Any:
        """Returns the global batch that is on the devices; nothing is sent.

        Each device has its rows, or all of them: `divide` splits the work inside the program then.
        """
        if self._is_single:
            return batch.parts[0]
        is_whole = have_all_rows(batch.split)
        sharding = self.replicated if is_whole else self.by_rows

        def join(*leaves: Any) -> Any:
            if leaves[0] is None:
                return None
            if isinstance(leaves[0], sparse.BCOO):  # its index arrays have no rows to split
                if is_whole:
                    return self._replicate(leaves[0])
                raise DatasetError(
                    "Cannot use a sparse array as the batch of one replica: JAX cannot join sparse arrays.",
                    received={"shape": tuple(leaves[0].shape)},
                    hint="Use `experimental_distribute_dataset` with AutoShardPolicy.DATA, or use dense arrays.",
                )
            shape = (batch.split[-1][1], *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

        return keras.tree.map_structure(join, *batch.parts)

    def join_values(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the values of all replicas as arrays over the mesh, concatenated by rows; scalars as rows.

        There is one array a local replica for each value, of equal shapes.
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

    def divide(self, batch: Any) -> Any:
        """Inside the program: has XLA split the rows over the replicas, also where these do not divide them.

        XLA pads the last part and masks the padding in every reduction, so numbers do not change.
        """

        if self._is_single:
            return batch

        def constrain(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or leaf.ndim == 0 or not self._divides(leaf.shape[0]):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.by_batch)

        return keras.tree.map_structure(constrain, batch)

    def _divides(self, num_rows: int) -> bool:
        """Says whether a program divides so many rows.

        Along one axis of several it does not pad: XLA's partitioner then counts some rows of a scatter (the gradient
        of an embedding, a confusion matrix) twice (jaxlib 0.10.2).
        """
        length = self.mesh.shape[self.by_batch.spec[0]]
        return num_rows >= length and (num_rows % length == 0 or length == self.num_replicas)

    def place_variables(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables on all devices; those of divided ones are the variables' own arrays."""
        values = [keras_hooks.native_value(variable) for variable in variables]
        whole_ones = [i for i, variable in enumerate(variables) if not is_divided(variable)]
        placed = self.place_state([values[i] for i in whole_ones])
        for i, value in zip(whole_ones, placed, strict=True):
            values[i] = value
        return values

    def shardings(self, variables: Sequence[Any]) -> Any:
        """Returns how a program is to leave variables; `None` for as it likes."""
        return None if self.storage is None else [self.storage.sharding(variable) for variable in variables]

    def show_variables(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Returns what variables hold of the values that a program has left; nothing is copied but to a holder."""
        if self.storage is None:
            return list(self.show(list(values)))
        return [
            arranged(value, self.storage.sharding(variable))
            for variable, value in zip(variables, values, strict=True)
        ]

    def kept_whole(self, variables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Gathers the variables for as long as this lasts, in the memory of the host."""
        return storage.kept_whole(self, variables)

    def local_values(self, variable: Any) -> Sequence[Any]:
        """Returns the value of a variable, whole."""
        return [np.asarray(variable)] if is_divided(variable) else [variable.value]

    def show(self, values: Any) -> Any:
        """Returns this worker's view of replicated arrays: plain arrays of one device, copied only to a holder."""
        if self._is_single:
            return values
        local = jax.tree.map(lambda value: value.addressable_data(0), values)
        return jax.device_put(local, self.holder) if self.is_central else local

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arrays that worker 0 has, on this worker's first device. All workers must call it."""
        hosts = [np.asarray(value) for value in values]
        words = _words(b"".join(host.tobytes() for host in hosts))
        # One row a device; a program that asks for the first one sends it to all.
        (rows,) = self.join_values([[words[None]] * len(self.devices)])
        first = jax.jit(lambda rows: rows[0], out_shardings=self.replicated)(rows)
        data = np.asarray(first.addressable_data(0)).tobytes()
        chief, start = [], 0
        for host in hosts:
            part = np.frombuffer(data, host.dtype, host.size, start).reshape(host.shape)
            chief.append(jax.device_put(part, self.holder, may_alias=False))
            start += host.nbytes
        return chief

    def throttle(self, values: Any) -> None:
        """Called after each step with its results: waits where a second step could get in the way."""
        note_dispatched(values)
        if self._one_at_a_time:
            with tracing.span("until ready", "step"):
                jax.block_until_ready(values)

    def _replicate(self, values: Any) -> Any:
        """Copies a tree of process-local arrays, equal on all workers, to all devices."""

        def over_workers(local: Any) -> Any:
            shards = [shard.data for shard in local.addressable_shards]
            return jax.make_array_from_single_device_arrays(local.shape, self.replicated, shards)

        copies = jax.device_put(values, self._local_replicated)
        return jax.tree.map(over_workers, copies) if self.num_workers > 1 else copies


def _in_parts(variables: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Variables as they travel: only so many at once that a device has room for them beside its own."""
    some: list[Any] = []
    size = 0
    for variable in variables:
        some.append(variable)
        size += math.prod(variable.shape) * 4
        if size > _MOST_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _words(data: bytes) -> Any:
    return np.frombuffer(data + bytes(-len(data) % 4), np.uint32)


def _as_array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (np.ndarray, jax.Array, sparse.BCOO)):
        return leaf
    if is_tf_sparse(leaf):
        return sparse.BCOO((leaf.values.numpy(), leaf.indices.numpy()), shape=tuple(leaf.shape))
    if is_scipy(leaf):
        return sparse.BCOO.from_scipy_sparse(leaf)
    if hasattr(leaf, "detach"):  # of PyTorch
        return torch_to_numpy(leaf)
    return np.asarray(to_dense(leaf) if is_ragged(leaf) else leaf)
