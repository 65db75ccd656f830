"""Aligned memory that frameworks use without a copy, and arrays that do not change later."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdist.arrays.memory import aligned_empty, unchanging


def test_arrays_begin_where_engines_want_them() -> None:
    for shape, dtype in (((3, 5), "float32"), ((), "int64"), ((0, 4), "bool"), ((7,), ml_dtypes.bfloat16)):
        for _ in range(4):
            array = aligned_empty(shape, dtype)
            assert array.shape == shape and array.dtype == dtype and array.flags.writeable
            assert array.size == 0 or array.ctypes.data % 64 == 0


def test_only_what_can_be_written_to_is_copied() -> None:
    array = np.arange(3)
    kept = unchanging(array)
    array[0] = 7
    assert kept.tolist() == [0, 1, 2]
    array.flags.writeable = False
    assert unchanging(array) is array
