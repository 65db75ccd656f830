"""PowerSGD: the replicas sum two thin matrices instead of the gradient of a matrix, and add the error to the next one.

Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.backends.variable_table import VariableTable

if TYPE_CHECKING:
    from kdist.arrays.types import TensorT


class LowRank:
    """The rank of the approximations, and the arrays of the replicas for each variable, as long as it lives.

    A replica keeps two arrays per matrix: the error, and the right factor of the last approximation.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slots: VariableTable[Sequence[Any]] = VariableTable()
        """For each variable, the result of `Replica.new_slots`; empty if its gradients are sent as they are."""

    def arrays(self, variable: keras.Variable) -> tuple[np.ndarray, ...]:
        """Returns the first arrays of a replica; none if the thin matrices would not be smaller."""
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        if (rows + columns) * self.rank >= rows * columns or dtype not in ("float32", "float64"):
            return ()
        # The same numbers on all workers, without a user's random generator.
        factor = np.random.default_rng(0).normal(size=(self.rank, columns))
        return np.zeros((rows, columns), dtype), factor.astype(dtype)

    def slots_of(
        self, variable: keras.Variable, new: Callable[[Sequence[np.ndarray]], Sequence[Any]]
    ) -> Sequence[Any]:
        """Returns the result of `new` for the first arrays, the same object in each call."""
        known = self.slots.get(variable)
        if known is None:
            arrays = self.arrays(variable)
            known = self.slots[variable] = new(arrays) if arrays else ()
        return known


def sums(
    gradients: Sequence[TensorT],
    slots: Sequence[Sequence[TensorT]],
    num_replicas: int,
    exchange: Callable[[list[TensorT]], Sequence[TensorT]],
) -> tuple[list[TensorT], list[Any]]:
    """Sums gradients over the replicas. Returns the sums or their approximations, and the new slots.

    Args:
        gradients: The gradients of a replica.
        slots: The error and the factor for each gradient; empty for a gradient that is sent as it is.
        num_replicas: The number of replicas.
        exchange: Sums tensors over the replicas.
    """
    ops, low = keras.ops, [i for i, slot in enumerate(slots) if slot]
    sent, news = list(gradients), list(slots)
    matrices = {i: ops.reshape(gradients[i], tuple(slots[i][0].shape)) + slots[i][0] for i in low}
    for i, matrix in matrices.items():
        sent[i] = ops.matmul(matrix, ops.transpose(slots[i][1]))
    totals = list(exchange(sent))
    # QR also returns orthonormal columns for a matrix of lower rank or of zeros, unlike Gram-Schmidt.
    left = {i: ops.qr(totals[i])[0] for i in low}
    right = exchange([ops.matmul(ops.transpose(left[i]), matrices[i]) for i in low]) if low else []
    for i, factor in zip(low, right, strict=True):
        total = ops.matmul(left[i], factor)
        totals[i] = ops.reshape(total, tuple(gradients[i].shape))
        # Without numbers from an overflow, after which a `LossScaleOptimizer` skips the update.
        new = matrices[i] - total / num_replicas, factor
        news[i] = tuple(ops.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in new)
    return totals, news
