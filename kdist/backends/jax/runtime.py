"""`JaxRuntime`: the devices and workers of a strategy on JAX, and the programs that run on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kdist import keras_hooks
from kdist.backends.contract import StepFunction
from kdist.backends.jax.collectives import next_turn
from kdist.backends.jax.core import JaxCore
from kdist.backends.jax.functions import JaxFunctions, leave_function
from kdist.backends.jax.steps import JaxSteps
from kdist.backends.jax.uneven_run import arrays_of_workers
from kdist.backends.messages import gather
from kdist.backends.workers import Workers
from kdist.errors import InvalidArgumentError, StrategyScopeError, check_equal_arrays
from kdist.topology import Topology

if TYPE_CHECKING:
    import keras


class JaxRuntime(JaxFunctions):
    """Runs functions and steps over the mesh."""

    def __init__(self, topology: Topology, group: Workers) -> None:
        super().__init__(topology, group)
        self._sum = jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=self.replicated)

    def traced(self, iterator: object) -> None:
        """Prevents compilation of a function that reads a dataset, because it acts for all replicas."""
        leave_function()
        if not self.can_exchange:
            raise StrategyScopeError(
                "Cannot read a distributed dataset inside jax.jit: the batch would become a constant.",
                hint="Use kdist.function, or read outside of the function and pass the batch.",
            )

    def begin_loop(self) -> None:
        """Prevents compilation of the running function; see `traced`."""
        leave_function()

    def sum_over_workers(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        if self.num_workers == 1:
            return list(tensors)
        leave_function()
        if not self.can_exchange:
            return [_sum_in_program(tensor, self) for tensor in tensors]
        with self.group.working():
            return [self._sum_over_workers(tensor) for tensor in tensors]

    def _sum_over_workers(self, tensor: jax.Array) -> jax.Array:
        """Sums a tensor. Raises an error if the shapes or dtypes differ: XLA would return wrong numbers or hang."""
        form = f"{tensor.dtype} {tensor.shape}"
        if self.memory is None:
            check_equal_arrays(gather(self, form))
        else:
            jax.block_until_ready(next_turn(self))  # running programs may still use the memory
            is_summable = self.memory.can_sum(tensor.dtype)
            mine = np.asarray(tensor) if is_summable else np.zeros(1, "int8")
            total = np.empty(mine.shape, mine.dtype)
            text = f"{tensor.shape}" if is_summable else form
            self.memory.sum_all([mine.reshape(-1)], [total.reshape(-1)], text)
            if is_summable:
                return jax.device_put(total, self.holder)
        others = len(self.devices) - 1  # only this worker's first device has the tensor
        (rows,) = self.join_values([[tensor[None], *[jax.numpy.zeros_like(tensor)[None]] * others]])
        return self._sum(rows).addressable_data(0)

    def gather_over_workers(self, tensor: jax.Array) -> jax.Array:
        if self.num_workers == 1:
            return tensor
        leave_function()
        if not self.can_exchange:
            return _gather_in_program(tensor, self)
        rows = np.concatenate(arrays_of_workers(self, np.asarray(tensor), 1))
        return jax.device_put(rows, self.holder)

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        strategy: Any = keras_hooks.strategy_of(model)
        if kind == "train" and strategy.own_ops is not None:
            raise InvalidArgumentError(
                "`fit` does not support custom cross_device_ops on JAX, because JAX compiles one program for all "
                "replicas.",
                received={"cross_device_ops": strategy.own_ops},
                hint="Remove cross_device_ops, or write a custom loop with `strategy.run`.",
            )
        return JaxSteps(self, model, kind)


def _sum_in_program(tensor: jax.Array, runtime: JaxCore) -> jax.Array:
    """Sums over the workers in a `merge_call`, where all devices of a worker have its tensor."""
    tensor, axes, number = jax.numpy.asarray(tensor), runtime.mesh.axis_names, len(runtime.devices)
    if jax.numpy.issubdtype(tensor.dtype, jax.numpy.inexact):
        return jax.lax.psum(tensor, axes) / number
    # A sum of integers over all devices could overflow before it is divided.
    is_first = jax.lax.axis_index(axes) % number == 0
    return jax.lax.psum(jax.numpy.where(is_first, tensor, 0), axes)


def _gather_in_program(rows: jax.Array, runtime: JaxCore) -> jax.Array:
    """Gathers rows over the workers in a `merge_call`; all workers have the same number of rows."""
    rows = jax.numpy.asarray(rows)
    everyone = jax.lax.all_gather(rows, runtime.mesh.axis_names)[:: len(runtime.devices)]
    return everyone.reshape(-1, *rows.shape[1:])
