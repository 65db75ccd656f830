"""`JaxBackend`: creates devices, joins workers, and shares the state of the shuffling generator."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kdist import keras_hooks
from kdist.backends.contract import Backend, Runtime
from kdist.backends.jax import devices as jax_devices
from kdist.backends.jax import functions, moments, programs, scopes, storage, tables, workers
from kdist.backends.jax.coordination import JaxEngine
from kdist.backends.jax.runtime import JaxRuntime
from kdist.cluster import visible_gpus
from kdist.communication.cross_device_ops import CrossDeviceOps
from kdist.communication.options import CommunicationOptions, hint_ignored
from kdist.topology import Topology

if TYPE_CHECKING:
    from kdist.arrays.types import Structure
    from kdist.backends.contract import DataAdapter

# NumPy's Mersenne Twister: position, whether a Gaussian is cached, and its value. The words follow.
_GENERATOR = struct.Struct("<qqd")


class JaxBackend(Backend):
    """Keras on JAX."""

    name = "jax"
    coordination_engine = JaxEngine

    list_devices = staticmethod(jax_devices.list_devices)
    require_devices = staticmethod(jax_devices.require_devices)
    function = staticmethod(functions.function)
    value_and_grad = staticmethod(functions.value_and_grad)

    def __init__(self) -> None:
        keras_hooks.hook_cond(scopes.cond)
        keras_hooks.hook_assignments(programs.assigned, storage.assigned_value)
        keras_hooks.hook_moments(moments.moments)
        keras_hooks.hook_embedding(tables.lookup)
        keras_hooks.hook_reading(storage.read, storage.shown)

    def native_batches(self, adapter: DataAdapter) -> Iterable[Structure]:
        return adapter.get_jax_iterator()

    own_devices = staticmethod(jax_devices.own_devices)

    def create_runtime(
        self,
        topology: Topology,
        options: CommunicationOptions | None = None,
        ops: CrossDeviceOps | None = None,
    ) -> Runtime:
        if ops is not None:
            hint_ignored(f"cross_device_ops={ops!r}", "on JAX, XLA chooses the algorithm.")
        wished = topology.devices or _cpus_of_mesh(topology)
        group = workers.join(wished, topology.cluster, options or CommunicationOptions())
        names = topology.devices or jax_devices.list_devices()
        if not topology.devices and names[0].startswith("cpu"):
            names = wished or names[:1]
        if not topology.devices and names[0].startswith("tpu"):
            names = jax_devices.along_links(names, _mesh_shape(topology, len(names)))
        return JaxRuntime(dataclasses.replace(topology, devices=names), group)

    def random_state(self) -> bytes:
        """Returns the state of NumPy's global generator, which Keras's array adapter shuffles with on JAX."""
        state = np.random.get_state(legacy=False)
        words = np.asarray(state["state"]["key"], dtype="<u4").tobytes()
        head = _GENERATOR.pack(state["state"]["pos"], state["has_gauss"], state["gauss"])
        return head + words

    def set_random_state(self, state: bytes) -> None:
        position, has_gauss, gauss = _GENERATOR.unpack_from(state)
        words = np.frombuffer(state, dtype="<u4", offset=_GENERATOR.size).astype(np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, gauss))


def _cpus_of_mesh(topology: Topology) -> tuple[str, ...]:
    """Returns CPUs for the mesh of a single process; none if its size is open or GPUs are visible."""
    sharded = topology.sharded
    if sharded is None or topology.cluster is not None or visible_gpus():
        return ()
    lengths = list(sharded.axes.values())
    return () if None in lengths else tuple(f"cpu:{i}" for i in range(math.prod(filter(None, lengths))))


def _mesh_shape(topology: Topology, num_local: int) -> tuple[int, ...]:
    number = num_local * (1 if topology.cluster is None else topology.cluster.num_workers)
    return topology.sharded.mesh_shape(number) if topology.sharded else (number,)
