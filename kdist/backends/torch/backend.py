"""The PyTorch backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kdist import keras_hooks
from kdist.backends import threads
from kdist.backends.contract import Backend
from kdist.backends.torch import devices as torch_devices
from kdist.backends.torch import functions, modules, seeds
from kdist.backends.torch.coordination import TorchEngine
from kdist.backends.torch.runtime import TorchRuntime
from kdist.backends.torch.workers import Workers, join
from kdist.communication.cross_device_ops import CrossDeviceOps
from kdist.communication.options import CommunicationOptions, hint_ignored
from kdist.topology import Topology

if TYPE_CHECKING:
    from kdist.arrays.types import Structure
    from kdist.backends.contract import DataAdapter

_GPU_STATE = 16  # bytes: a seed and an offset


class TorchBackend(Backend):
    """Keras on PyTorch."""

    name = "torch"
    coordination_engine = TorchEngine

    list_devices = staticmethod(torch_devices.list_devices)
    require_devices = staticmethod(torch_devices.require_devices)
    function = staticmethod(functions.function)
    value_and_grad = staticmethod(functions.value_and_grad)

    def __init__(self) -> None:
        threads.captures = torch_devices.current_gpu
        self._gpus: list[torch.device] = []  # the GPUs of the last strategy, in the order of its replicas
        keras_hooks.hook_torch_modules(modules.zero_grad, modules.call_module)
        keras_hooks.hook_torch_random(seeds.torch_seed_generator)
        keras_hooks.hook_torch_recomputing()
        keras_hooks.hook_torch_images()

    def native_batches(self, adapter: DataAdapter) -> Iterable[Structure]:
        return adapter.get_torch_dataloader()

    def own_devices(self, names: Sequence[str], num_workers: int) -> tuple[str, ...]:
        """Returns this worker's devices. Empty with one per worker: `devices_of_worker` then selects it."""
        return () if len(names) == num_workers > 1 else super().own_devices(names, num_workers)

    def create_runtime(
        self,
        topology: Topology,
        options: CommunicationOptions | None = None,
        ops: CrossDeviceOps | None = None,
    ) -> TorchRuntime:
        if ops is not None:
            hint_ignored(
                f"cross_device_ops={ops!r}",
                "on PyTorch, the replicas of one process run one after the other.",
            )
        options, cluster = options or CommunicationOptions(), topology.cluster
        names = self.require_devices(topology.devices) or torch_devices.devices_of_worker(cluster)
        options = options.for_devices(names, topology.worker_index)
        if options.bytes_per_pack:
            hint_ignored(
                f"bytes_per_pack={options.bytes_per_pack}",
                "on PyTorch, all gradients of a dtype are in one pack.",
                topology.worker_index,
            )
        self._gpus = [torch_devices.torch_device(name) for name in names if name.startswith("gpu:")]
        group = join(cluster, names, options) if cluster is not None else Workers()
        return TorchRuntime(dataclasses.replace(topology, devices=names), group)

    def random_state(self) -> bytes:
        """Returns the states of PyTorch's CPU generator, which shuffles data, and of the GPU generators."""
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpus)]
        return b"".join(state.numpy().tobytes() for state in states)

    def set_random_state(self, state: bytes) -> None:
        """Sets the state of PyTorch's CPU generator, and of each GPU for which `state` contains one."""
        states = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
        size = len(torch.get_rng_state())
        torch.set_rng_state(states[:size])
        for gpu, own in zip(self._gpus, states[size:].reshape(-1, _GPU_STATE), strict=False):
            torch.cuda.set_rng_state(own, gpu)
