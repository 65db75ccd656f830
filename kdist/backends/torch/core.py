"""`TorchCore`: the devices, workers and replica threads that loops and steps use."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import keras
import torch

from kdist import keras_hooks
from kdist.backends.contract import Runtime
from kdist.backends.threads import ReplicaThreads
from kdist.backends.torch import storage
from kdist.backends.torch.components import Components
from kdist.backends.torch.copies import VariableCopies
from kdist.backends.torch.devices import keras_device, torch_device
from kdist.backends.torch.divided import Divided
from kdist.backends.torch.storage import Storage
from kdist.backends.torch.workers import Workers
from kdist.backends.workers import in_parts
from kdist.topology import Topology


class TorchCore(Runtime):
    """The replicas on the devices of this worker, and the workers of the cluster."""

    group: Workers

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.torch_devices = tuple(torch_device(name) for name in self.devices)
        sharded = topology.sharded
        self.storage: Storage | None = None
        if sharded is not None:
            sharded.mesh_shape(self.num_replicas)
            if self.num_workers > 1:
                self.storage = Storage(self, sharded, self.torch_devices[0])
        self._holder = torch_device(topology.parameter_devices[0])
        # Variables to shard are created on the host, because a device may be too small for a whole variable.
        self._cradle = self._holder if self.storage is None else torch.device("cpu")
        copies = [VariableCopies(device) for device in self.torch_devices]
        # The first replica uses the real variables, unless another device holds them.
        is_central = topology.is_central
        self.copies_of: list[VariableCopies | None] = [copies[0] if is_central else None, *copies[1:]]
        self.copies = copies[0 if is_central else 1 :]
        self.components = Components(self.torch_devices, self.replica_ids, self.num_replicas)
        first = self.replica_ids[0]
        self.threads = ReplicaThreads([f"replica {first + i} ({n})" for i, n in enumerate(self.devices)])

    def scope(self) -> AbstractContextManager[object]:
        """Creates variables on the device that holds them, or on the host if they will be sharded."""
        return keras_device(self._cradle)

    def on_holder(self) -> AbstractContextManager[object]:
        """Lets Keras compute on the device that holds the variables, for example in an optimizer."""
        return keras_device(self._holder)

    def to_holder(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [keras.ops.convert_to_tensor(part).to(self._holder) for part in parts]

    def sum_over_workers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.num_workers == 1:
            return list(tensors)
        totals = [tensor.detach().clone() for tensor in tensors]
        for total in totals:
            self.group.all_reduce(total)
        return totals

    def gather_over_workers(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.num_workers == 1 else self.group.gather_uneven(tensor.detach())[0]

    def broadcast_variables(self, variables: Sequence[keras.Variable]) -> None:
        tensors = [keras_hooks.native_value(variable) for variable in variables]
        # A variable that is already sharded has the chief's value.
        tensors = [tensor.detach() for tensor in tensors if not isinstance(tensor, Divided)]
        for some in in_parts(tensors, lambda tensor: tensor.nbytes):
            self.group.broadcast(some, self.torch_devices[0])
        if self.storage is not None:
            self.storage.take(variables)

    def local_values(self, variable: keras.Variable) -> Sequence[torch.Tensor]:
        """Returns the whole real value on the host. The copies of other replicas follow it at every step."""
        return [variable.value.detach().cpu()]

    def kept_whole(self, variables: Sequence[keras.Variable]) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self.storage is None else self.storage.kept_whole(variables)

    local_parts = staticmethod(storage.local_parts)
