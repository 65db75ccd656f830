"""Arrays in memory that backends can use without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT = 64  # bytes; TensorFlow and JAX copy arrays with another alignment


def aligned_empty(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
    """Returns an uninitialized array that TensorFlow and JAX can use without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def unchanging(array: np.ndarray) -> np.ndarray:
    """Returns an array with the current values that later writes do not change: a copy if it is writable."""
    return array.copy() if array.flags.writeable else array
