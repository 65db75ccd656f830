"""Collectives of replicas in one program: sums, gathered rows, and functions for all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import keras
import numpy as np

from kdist.values import DistributedValues, PerReplica

if TYPE_CHECKING:
    from kdist.arrays.types import R, T

BATCH_AXIS = "batch"


class Collectives(Protocol):
    """The operations that connect the replicas of a user function."""

    replica_id: int | jax.Array
    local_index: int | jax.Array

    def sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Sums each tensor over all replicas."""

    def gather(self, rows: jax.Array) -> tuple[jax.Array, int | jax.Array]:
        """Returns the rows of all replicas, and the index of this replica's first row."""

    def merge(self, function: Callable[[T], R], values: T) -> R:
        """Calls a function with the values of all local replicas, and returns this replica's component."""


class MeshCollectives:
    """The collectives of a program that all devices run with equal tensor shapes."""

    def __init__(self, runtime: Any) -> None:
        self._num_replicas = runtime.num_replicas
        self._num_local = len(runtime.devices)
        self._axes: tuple[str, ...] = runtime.mesh.axis_names
        alone = self._num_replicas == 1
        self.replica_id: int | jax.Array = 0 if alone else jax.lax.axis_index(self._axes)
        self.local_index: int | jax.Array = 0 if self._num_local == 1 else self.replica_id % self._num_local

    def sum(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Sums each tensor over all devices."""
        if self._num_replicas == 1:
            return list(tensors)
        totals = jax.lax.psum(tuple(tensors), self._axes)
        # Without the cast, a sum of booleans would be a number.
        return [total.astype(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    def gather(self, rows: jax.Array) -> tuple[jax.Array, int | jax.Array]:
        """Returns the rows of all devices. Their numbers are equal, because all devices run one program."""
        if self._num_replicas == 1:
            return rows, 0
        return jax.lax.all_gather(rows, self._axes, tiled=True), self.replica_id * rows.shape[0]

    def merge(self, function: Callable[[T], R], values: T) -> R:
        """Calls a function on every device with the values of all devices of its worker."""
        if self._num_local == 1:
            return function(values)
        first = self.replica_id - self.local_index

        def join(leaf: object) -> object:
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                return leaf
            everyone = jax.lax.all_gather(leaf, self._axes)
            return PerReplica([everyone[first + i] for i in range(self._num_local)])

        def choose(leaf: object) -> object:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return jax.numpy.stack(leaf.values)[self.local_index]

        result = function(keras.tree.map_structure(join, values))
        return keras.tree.map_structure(choose, result)
