"""Memory that engines take as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes: TensorFlow and JAX copy arrays that begin elsewhere


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array with any numbers in it, which TensorFlow and JAX can hold as their own without copying it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def unchanging(array: np.ndarray) -> np.ndarray:
    """Returns an array with the numbers that it has now, whatever is written to it: a copy, if anybody can."""
    return array.copy() if array.flags.writeable else array
