"""`JaxCore`: the devices and workers of one strategy, as loops and steps see them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from kdist.backends.contract import Runtime
from kdist.backends.jax.devices import find_devices
from kdist.backends.jax.meeting import without_chatter
from kdist.backends.jax.replicas import Replicas
from kdist.backends.jax.workers import all_devices
from kdist.backends.workers import Workers


class JaxCore(Runtime):
    """A mesh of all devices of all workers."""

    sees_all_rows = True

    needs_equal_shapes = True

    def __init__(self, devices: Sequence[str], group: Workers) -> None:
        super().__init__(devices, group)
        local = find_devices(self.devices)
        self.replicas = Replicas(all_devices(group, local), local, self.worker_index)
        if self.num_workers > 1:
            with without_chatter(), group.working():
                self.replicas.connect()

    def scope(self) -> AbstractContextManager[Any]:
        """Creates variables on the strategy's first device."""
        first = self.replicas.first_device
        if first == jax.local_devices()[0]:
            return contextlib.nullcontext()  # JAX's default anyway; setting it would trace functions anew
        return jax.default_device(first)

    @property
    def can_exchange(self) -> bool:
        """Not in a program, which runs later."""
        return not isinstance(jax.numpy.zeros(()), jax.core.Tracer)

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Puts one batch for each local replica on its device."""
        return self.replicas.place_parts(parts)

    def to_first_device(self, parts: Sequence[Any]) -> list[Any]:
        """Returns tensors on the first device of this worker."""
        return [
            part if isinstance(part, jax.core.Tracer) else jax.device_put(part, self.replicas.first_device)
            for part in parts
        ]

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives every worker the values that the chief has."""
        if self.num_workers > 1:
            values = self.replicas.broadcast([variable.value for variable in variables])
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
