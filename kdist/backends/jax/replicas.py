"""`Replicas`: the mesh over all devices, and the placing of state and batches on it.

A replica is a device of the mesh. Nothing is computed per replica: the step is one global program, and XLA
divides its rows. So "placing" is all there is: state is replicated, batches are split by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdist.arrays.rows import is_ragged, is_scipy, is_tf_sparse, to_dense
from kdist.arrays.splitting import have_all_rows
from kdist.backends.contract import ReplicaBatches
from kdist.backends.jax.collectives import BATCH_AXIS, Collectives
from kdist.backends.jax.dispatched import note_dispatched
from kdist.backends.replica import Replica, equal_shares
from kdist.context import cross_replica
from kdist.errors import DatasetError


class Replicas:
    """The devices of all workers as one axis, those of worker 0 first."""

    def __init__(self, devices: Sequence[Any], local_devices: Sequence[Any], worker_index: int) -> None:
        self.num_replicas = len(devices)
        self.first_device = local_devices[0]
        self.local_devices = list(local_devices)
        self._num_local = len(local_devices)
        first = worker_index * self._num_local
        self.local_ids = range(first, first + self._num_local)
        self._is_global = len(devices) > len(local_devices)
        self.mesh, local_mesh = (Mesh(np.array(list(d)), (BATCH_AXIS,)) for d in (devices, local_devices))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(BATCH_AXIS))
        self._local_replicated = NamedSharding(local_mesh, PartitionSpec())
        self._sum = jax.jit(lambda rows: rows.sum(0), out_shardings=self.replicated)
        # Several executions in flight on several CPU devices can exhaust XLA's threads, each waiting for the
        # other's collectives. PJRT_NPROC makes this unlikely, one execution at a time makes it impossible.
        self._one_at_a_time = len(local_devices) > 1 and self.first_device.platform == "cpu"

    def place_state(self, values: Any) -> Any:
        """Copies process-local arrays to all devices.

        Every worker passes equal values; nothing is sent between workers. The result shares no memory with
        `values`, so it may be donated while variables still show them.
        """
        # A replicated device_put would share the first device's buffer even with may_alias=False.
        return self._replicate(jax.device_put(values, self.first_device, may_alias=False))

    def place_parts(self, parts: Sequence[Any]) -> list[Any]:
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

    def join_parts(self, batch: ReplicaBatches) -> Any:
        """Returns the global batch that is on the devices; nothing is sent.

        Each device has its rows, or all of them: `divide` splits the work inside the program then.
        """
        is_whole = have_all_rows(batch.split)
        sharding = self.replicated if is_whole else self.split

        def join(*leaves: Any) -> Any:
            if leaves[0] is None:
                return None
            if isinstance(leaves[0], sparse.BCOO):  # its index arrays have no rows to split
                if is_whole:
                    return self._replicate(leaves[0])
                raise DatasetError(
                    "On JAX a sparse array belongs to the whole global batch, not to a replica.",
                    received={"shape": tuple(leaves[0].shape)},
                    hint="Use `experimental_distribute_dataset` with AutoShardPolicy.DATA, or dense arrays.",
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
            placed.append(jax.make_array_from_single_device_arrays(whole, self.split, local))
        return placed

    def sum_over_workers(self, tensor: Any) -> Any:
        """Sums tensors of the workers, of equal shapes; on this worker's first device."""
        rows = [tensor[None], *[jax.numpy.zeros_like(tensor)[None]] * (self._num_local - 1)]
        (stacked,) = self.join_values([rows])
        return self._sum(stacked).addressable_data(0)

    def divide(self, batch: Any) -> Any:
        """Inside the program: has XLA split the rows over the replicas, also where these do not divide them.

        XLA pads the last part and masks the padding in every reduction, so numbers do not change.
        """

        def constrain(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or leaf.ndim == 0 or leaf.shape[0] < self.num_replicas:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.split)

        return keras.tree.map_structure(constrain, batch)

    def show(self, values: Any) -> Any:
        """Returns this worker's view of replicated arrays, without a copy: plain arrays of one device."""
        return jax.tree.map(lambda value: value.addressable_data(0), values)

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arrays that worker 0 has, on this worker's first device. All workers must call it."""
        hosts = [np.asarray(value) for value in values]
        words = _words(b"".join(host.tobytes() for host in hosts))
        # One row a device; a program that asks for the first one sends it to all.
        (rows,) = self.join_values([[words[None]] * self._num_local])
        first = jax.jit(lambda rows: rows[0], out_shardings=self.replicated)(rows)
        data = np.asarray(first.addressable_data(0)).tobytes()
        chief, start = [], 0
        for host in hosts:
            part = np.frombuffer(data, host.dtype, host.size, start).reshape(host.shape)
            chief.append(jax.device_put(part, self.first_device, may_alias=False))
            start += host.nbytes
        return chief

    def connect(self) -> None:
        """Runs the first collective over all devices, so that a broken connection shows here."""
        if self._is_global:
            self.broadcast([np.zeros(1, np.float32)])

    def throttle(self, values: Any) -> None:
        """Called after each step with its results: waits where a second step could get in the way."""
        note_dispatched(values)
        if self._one_at_a_time:
            jax.block_until_ready(values)

    def _replicate(self, values: Any) -> Any:
        """Copies a tree of process-local arrays, equal on all workers, to all devices."""

        def over_workers(local: Any) -> Any:
            shards = [shard.data for shard in local.addressable_shards]
            return jax.make_array_from_single_device_arrays(local.shape, self.replicated, shards)

        copies = jax.device_put(values, self._local_replicated)
        return jax.tree.map(over_workers, copies) if self._is_global else copies


class JaxReplica(Replica):
    """A replica that runs a function of the user's."""

    def __init__(self, strategy: Any, collectives: Collectives) -> None:
        number = strategy.num_replicas_in_sync
        super().__init__(
            strategy,
            collectives.replica_id,
            number,
            equal_shares(number)[0],
            collectives.local_index,
            is_model_step=False,
        )
        self._collectives = collectives

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica; of one program for several devices, all of them."""
        names = self.strategy.runtime.devices
        return (names[self.local_index],) if isinstance(self.local_index, int) else tuple(names)

    def all_reduce_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums each tensor over all replicas."""
        return self._collectives.sum(tensors)

    def all_reduce_with_gradient(self, tensor: Any) -> Any:
        """Sums a tensor over all replicas; its gradient is the sum of theirs."""

        @jax.custom_vjp
        def total(x: Any) -> Any:
            return self._collectives.sum([x])[0]

        total.defvjp(lambda x: (total(x), None), lambda _, gradient: (total(gradient),))
        return total(tensor)

    def gather_tensor(self, tensor: Any, axis: int) -> Any:
        """Concatenates the tensors of all replicas; what each is used for counts in the gradient."""
        self.note(f"all_gather(axis={axis})", [])
        numpy = jax.numpy
        number = tensor.shape[axis]

        @jax.custom_vjp
        def gather(x: Any) -> Any:
            return self._collectives.gather(x)[0]

        def backward(first: Any, gradient: Any) -> Any:
            total = self._collectives.sum([gradient])[0]
            return (jax.lax.dynamic_slice_in_dim(total, first, number),)

        gather.defvjp(self._collectives.gather, backward)
        return numpy.moveaxis(gather(numpy.moveaxis(tensor, axis, 0)), 0, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function for all replicas of this worker."""
        self.require_running("merge_call")

        scope: Any = self.scope
        scope.aggregate(only_on_read=True)

        def call(values: Any) -> Any:
            merged_args, merged_kwargs = values
            with scope.crossing() as written, cross_replica(self.strategy):
                result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
            return result, written

        result, written = self._collectives.merge(call, (tuple(args), dict(kwargs or {})))
        with scope.crossing():  # the function may have run in another's place
            for variable, value in written:
                variable.assign(value)
        return result

    def for_all(self, value: Any) -> Any:
        """Returns a value where functions that speak for all replicas compute: the first device, or a program."""
        runtime: Any = self.strategy.runtime
        first = runtime.replicas.first_device
        return value if isinstance(value, jax.core.Tracer) else jax.device_put(value, first)

    def apply_gradients(self, apply: Callable[[], Any]) -> Any:
        """Runs Keras's `optimizer.apply`; all replicas do the same sums."""
        assert self.scope is not None
        with self.scope.untracked():
            return apply()


def _words(data: bytes) -> Any:
    return np.frombuffer(data + bytes(-len(data) % 4), np.uint32)


def _as_array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (np.ndarray, jax.Array, sparse.BCOO)):
        return leaf
    if is_tf_sparse(leaf):
        return sparse.BCOO((leaf.values.numpy(), leaf.indices.numpy()), shape=tuple(leaf.shape))
    if is_scipy(leaf):
        return sparse.BCOO.from_scipy_sparse(leaf)
    if hasattr(leaf, "detach"):  # a PyTorch tensor, possibly on a GPU
        leaf = leaf.detach().cpu()
    return np.asarray(to_dense(leaf) if is_ragged(leaf) else leaf)
