"""`JaxRuntime`: the devices and workers of one strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from kdist import keras_hooks
from kdist.arrays.gathering import gather_rows
from kdist.backends.contract import Runtime, StepFunction
from kdist.backends.jax.collectives import BATCH_AXIS
from kdist.backends.jax.devices import find_devices
from kdist.backends.jax.loops import Loops, leave_function
from kdist.backends.jax.meeting import without_chatter
from kdist.backends.jax.replicas import Replicas
from kdist.backends.jax.steps import JaxSteps
from kdist.backends.jax.workers import all_devices
from kdist.backends.replica import divide
from kdist.backends.workers import Workers
from kdist.errors import InvalidArgumentError, StrategyScopeError


class JaxRuntime(Runtime):
    """Runs steps over a mesh of all devices of all workers.

    Args:
        devices: Short names of the local devices, one a replica.
        workers: The workers of the cluster, joined, or this process alone.
    """

    sees_all_rows = True

    needs_equal_shapes = True

    def __init__(self, devices: Sequence[str], workers: Workers) -> None:
        super().__init__(devices, workers)
        local = find_devices(self.devices)
        self.replicas = Replicas(all_devices(workers, local), local, self.worker_index)
        self._loops = Loops(self)
        if self.num_workers > 1:
            with without_chatter(), workers.working():
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

    def traced(self, iterator: Any) -> None:
        """A function that reads speaks for all replicas: it is not compiled as one."""
        leave_function()
        if not self.can_exchange:
            raise StrategyScopeError(
                "What jax.jit traces cannot read a distributed dataset: the batch would be a constant.",
                hint="Use kdist.function, or read outside and pass the batch.",
            )

    def begin_loop(self) -> None:
        """As `traced`."""
        leave_function()

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Puts one batch for each local replica on its device."""
        return self.replicas.place_parts(parts)

    def run(
        self, strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any]:
        """Calls a function in every replica, as one compiled program."""
        return self._loops.run(strategy, fn, args, kwargs)

    def to_first_device(self, parts: Sequence[Any]) -> list[Any]:
        """Returns tensors on the first device of this worker."""
        return [
            part if isinstance(part, jax.core.Tracer) else jax.device_put(part, self.replicas.first_device)
            for part in parts
        ]

    def sum_over_workers(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums tensors over the workers."""
        if self.num_workers == 1:
            return list(tensors)
        leave_function()
        if not self.can_exchange:
            return [_sum_in_program(tensor, len(self.devices)) for tensor in tensors]
        with self.group.working():
            return [self.replicas.sum_over_workers(tensor) for tensor in tensors]

    def gather_over_workers(self, tensor: Any) -> Any:
        """Concatenates the rows of the workers' tensors."""
        if self.num_workers == 1:
            return tensor
        leave_function()
        if not self.can_exchange:
            return _gather_in_program(tensor, len(self.devices))
        rows = gather_rows(self.group, [np.asarray(tensor)])
        return jax.device_put(rows, self.replicas.first_device)

    def step_function(self, model: Any, kind: str) -> StepFunction:
        """Returns the program of the step."""
        strategy: Any = keras_hooks.strategy_of(model)
        if kind == "train" and strategy.own_ops is not None:
            raise InvalidArgumentError(
                "On JAX `fit` is one program for all devices, which knows no gradients of single replicas: "
                "a CrossDeviceOps of one's own is called in loops with `strategy.run` alone.",
                received={"cross_device_ops": strategy.own_ops},
                hint="Leave cross_device_ops out, or write the loop with `strategy.run`.",
            )
        return JaxSteps(model, self.replicas, self.group, kind)

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Gives every worker the values that the chief has."""
        if self.num_workers > 1:
            values = self.replicas.broadcast([variable.value for variable in variables])
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


def _sum_in_program(tensor: Any, num_local: int) -> Any:
    """In a `merge_call`, where all devices of a worker have its tensor: the sum over the workers."""
    tensor = jax.numpy.asarray(tensor)
    total = jax.lax.psum(tensor, BATCH_AXIS)
    return divide(total, num_local).astype(tensor.dtype)


def _gather_in_program(rows: Any, num_local: int) -> Any:
    """In a `merge_call`: the rows of all workers, of which each has as many."""
    rows = jax.numpy.asarray(rows)
    everyone = jax.lax.all_gather(rows, BATCH_AXIS)[::num_local]
    return everyone.reshape(-1, *rows.shape[1:])
