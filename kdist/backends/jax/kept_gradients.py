"""Gradients that the devices keep on JAX until the optimizer needs their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kdist.backends import low_rank
from kdist.backends.jax.row_rules import SUM, WHOLE, Value
from kdist.backends.kept_gradients import KeptGradients

if TYPE_CHECKING:
    from kdist.backends.jax.core import JaxCore


class Kept:
    """The gradients and errors that a device keeps, and whether the step needs sums over all devices.

    Args:
        kept: Two lists in the order of the arrays named `GRADIENT`: the sums of the gradients of earlier batches, or
            an empty list; and the slots for `low_rank.sums`, or an empty list.
        is_due: Whether the step needs the sum. Otherwise, it uses zeros.
    """

    def __init__(self, kept: Sequence[Sequence[Any]], is_due: bool | None) -> None:
        self.arrays, self.slots = map(list, kept)
        self.is_due = is_due
        self.waiting: dict[int, jax.Array] = {}
        """The gradients that `sum_waiting` will sum."""
        self._totals: dict[int, jax.Array] = {}

    def replace(self, index: int, part: jax.Array) -> list[Value]:
        """Returns the array that the step uses instead of this device's part of a gradient; none if it must wait."""
        if index in self._totals:
            return [Value(self._totals[index], WHOLE)]
        if index in self.waiting:
            return []
        if self.arrays:
            part = self.arrays[index] + part
            zeros = jnp.zeros_like(part)
            self.arrays[index] = zeros if self.is_due else part
            if not self.is_due:
                return [Value(zeros, WHOLE)]
        if not self.slots:
            return [Value(part, SUM)]
        self.waiting[index] = part
        return []

    def sum_waiting(
        self, number: int, exchange: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    ) -> None:
        """Sums the gradients that wait over a number of devices, with PowerSGD."""
        slots = [self.slots[index] for index in self.waiting]
        totals, slots = low_rank.sums([*self.waiting.values()], slots, number, exchange)
        for index, total, slot in zip(self.waiting, totals, slots, strict=True):
            self._totals[index], self.slots[index] = total, slot
        self.waiting = {}


def on_each_device(runtime: JaxCore, array: np.ndarray) -> jax.Array:
    """Returns an array with one row per device, all equal to an array."""
    shape = (runtime.num_replicas, *array.shape)
    return jax.make_array_from_callback(shape, runtime.by_rows, lambda index: array[None])


class CannotKeep(Exception):
    """Raised while a step is traced that must sum gradients after each batch."""


class KeptOnDevices(KeptGradients):
    """Arrays with one row per device, on all devices of the mesh."""

    _runtime: JaxCore

    def __init__(self, runtime: JaxCore, model: keras.Model) -> None:
        super().__init__(runtime, model)
        self._shapes = [(tuple(v.shape), v.dtype) for v in model.trainable_variables]
        self.arrays = self._zeros()

    def _zeros(self) -> list[jax.Array]:
        return [on_each_device(self._runtime, np.zeros(shape, dtype)) for shape, dtype in self._shapes]

    def take(self) -> list[jax.Array]:
        parts = [[np.asarray(shard.data)[0] for shard in array.addressable_shards] for array in self.arrays]
        self.arrays = self._zeros()
        return [jnp.asarray(np.sum(each, axis=0)) for each in parts]
