"""`TorchCore`: devices, workers, and the threads of replicas, as loops and steps see them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from kdist.backends.contract import Runtime
from kdist.backends.threads import ReplicaThreads
from kdist.backends.torch.components import Components
from kdist.backends.torch.devices import torch_device
from kdist.backends.torch.replicas import VariableCopies
from kdist.backends.torch.workers import Workers
from kdist.topology import Central, Topology


class TorchCore(Runtime):
    """Replicas on the devices of this worker, and the workers of the cluster."""

    group: Workers

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self.torch_devices = tuple(torch_device(name) for name in self.devices)
        self._holder = torch_device(topology.parameter_devices[0])
        copies = [VariableCopies(device) for device in self.torch_devices]
        # The first replica works on the real variables, unless they are held elsewhere.
        is_central = isinstance(topology.storage, Central)
        self.copies_of: list[VariableCopies | None] = [copies[0] if is_central else None, *copies[1:]]
        self.copies = copies[0 if is_central else 1 :]
        self.components = Components(self.torch_devices, self.replica_ids, self.num_replicas)
        first = self.replica_ids[0]
        self.threads = ReplicaThreads([f"replica {first + i} ({n})" for i, n in enumerate(self.devices)])

    def scope(self) -> AbstractContextManager[Any]:
        """Variables are created on the device that holds them."""
        return keras.device(str(self._holder))

    def to_holder(self, parts: Sequence[Any]) -> list[Any]:
        """Returns tensors on the device that holds variables."""
        return [keras.ops.convert_to_tensor(part).to(self._holder) for part in parts]

    def sum_over_workers(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors over the workers."""
        if self.num_workers == 1:
            return list(tensors)
        totals = [tensor.detach().clone() for tensor in tensors]
        for total in totals:
            self.group.all_reduce(total)
        return totals

    def gather_over_workers(self, tensor: Any) -> Any:
        """Concatenates the rows of the workers' tensors."""
        return tensor if self.num_workers == 1 else self.group.gather_uneven(tensor.detach())[0]

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Sends the chief's values in one collective."""
        if variables:
            self.group.broadcast([variable.value.detach() for variable in variables], self.torch_devices[0])

    def local_values(self, variable: Any) -> Sequence[Any]:
        """Returns the real value, on the host; the copies of other replicas follow it at every step."""
        return [variable.value.detach().cpu()]
