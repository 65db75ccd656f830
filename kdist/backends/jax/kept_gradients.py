"""Gradients that the devices keep on JAX until the optimizer needs their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kdist.backends.jax.row_rules import SUM, WHOLE, Value
from kdist.backends.kept_gradients import KeptGradients

if TYPE_CHECKING:
    from kdist.backends.jax.core import JaxCore


class Kept:
    """The gradients that a device keeps, and whether the step needs their sum over all devices.

    Args:
        arrays: The sums of the gradients of earlier batches, in the order of the arrays named `GRADIENT`.
        is_due: Whether the step needs the sum. Otherwise, it uses zeros.
    """

    def __init__(self, arrays: Sequence[jax.Array], is_due: bool) -> None:
        self.arrays = list(arrays)
        self.is_due = is_due

    def replace(self, index: int, part: jax.Array) -> Value:
        """Returns the array that the step uses instead of this device's part of a gradient."""
        total = self.arrays[index] + part
        zeros = jnp.zeros_like(total)
        self.arrays[index] = zeros if self.is_due else total
        return Value(total, SUM) if self.is_due else Value(zeros, WHOLE)


class CannotKeep(Exception):
    """Raised while a step is traced that must sum gradients after each batch."""


class KeptOnDevices(KeptGradients):
    """Arrays with one row per device, on all devices of the mesh."""

    def __init__(self, runtime: JaxCore, model: keras.Model) -> None:
        super().__init__(runtime, model)
        self.sharding = NamedSharding(runtime.mesh, PartitionSpec(runtime.mesh.axis_names))
        self._shapes = [(tuple(v.shape), v.dtype) for v in model.trainable_variables]
        self.arrays = self._zeros()

    def _zeros(self) -> list[jax.Array]:
        number = self.sharding.mesh.size
        return [
            jax.make_array_from_callback(
                (number, *shape), self.sharding, lambda index, s=shape, d=dtype: np.zeros((1, *s), d)
            )
            for shape, dtype in self._shapes
        ]

    def take(self) -> list[jax.Array]:
        """Returns the sums over the local devices."""
        parts = [[np.asarray(shard.data)[0] for shard in array.addressable_shards] for array in self.arrays]
        self.arrays = self._zeros()
        return [jnp.asarray(np.sum(each, axis=0)) for each in parts]
