"""`JaxRuntime`: the devices and workers of one strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from kdist.backends.contract import Runtime, StepFunction
from kdist.backends.jax.devices import find_devices
from kdist.backends.jax.replicas import Replicas
from kdist.backends.jax.steps import JaxSteps
from kdist.backends.jax.workers import Workers, without_chatter


class JaxRuntime(Runtime):
    """Runs steps over a mesh of all devices of all workers.

    Args:
        devices: Short names of the local devices, one a replica.
        workers: The workers, joined.
    """

    splits_sparse = False  # a sparse array of JAX belongs to one device, or to all alike

    needs_equal_shapes = True

    def __init__(self, devices: Sequence[str], workers: Workers) -> None:
        self.devices = tuple(devices)
        self.num_workers = workers.num_workers
        self.worker_index = workers.worker_index
        self._workers = workers
        local = find_devices(self.devices)
        self.replicas = Replicas(workers.all_devices(local), local, self.worker_index)
        if self.num_workers > 1:
            with without_chatter(), workers.working():
                self.replicas.connect()

    def scope(self) -> AbstractContextManager[Any]:
        """Creates variables on the strategy's first device."""
        first = self.replicas.first_device
        if first == jax.local_devices()[0]:
            return contextlib.nullcontext()  # JAX's default anyway; setting it would trace functions anew
        return jax.default_device(first)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker, in the order of their indices."""
        return self._workers.all_gather_bytes(data)

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Puts one batch for each local replica on its device."""
        return self.replicas.place_parts(parts)

    def train_function(self, model: Any) -> StepFunction:
        """Returns the function that runs `model.train_step` on global batches."""
        return JaxSteps(model, self.replicas, self._workers, "train")

    def test_function(self, model: Any) -> StepFunction:
        """Returns the function that runs `model.test_step` on global batches."""
        return JaxSteps(model, self.replicas, self._workers, "test")

    def predict_function(self, model: Any) -> StepFunction:
        """Returns the function that runs `model.predict_step` on global batches."""
        return JaxSteps(model, self.replicas, self._workers, "predict")

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives every worker the values that the chief has."""
        if self.num_workers > 1:
            values = self.replicas.broadcast([variable.value for variable in variables])
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def explain_failure(self, error: BaseException) -> BaseException:
        """Names the worker that was lost, where an error of JAX comes from that."""
        return self._workers.explain_failure(error)
