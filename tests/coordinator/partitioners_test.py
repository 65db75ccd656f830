"""Partitioners against results by hand; `partitioners_multi_process_test.py` compares with TensorFlow's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdist.coordinator.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(3), (10, 3), [3, 1]),
        (FixedShardsPartitioner(3), (2, 3), [2, 1]),
        (FixedShardsPartitioner(3), (0, 3), [0, 1]),  # like TensorFlow
        (MinSizePartitioner(12, max_shards=8), (6, 2), [4, 1]),  # 48 bytes
        (MinSizePartitioner(12, max_shards=3), (6, 2), [3, 1]),
        (MinSizePartitioner(), (1 << 20, 2), [1, 1]),
        (MaxSizePartitioner(16), (6, 2), [3, 1]),  # two rows each
        (MaxSizePartitioner(4), (6, 2), [6, 1]),  # a row is not divided
        (MaxSizePartitioner(16, max_shards=2), (6, 2), [2, 1]),
        (MaxSizePartitioner(16), (0, 2), [1, 1]),
    ],
)
def test_by_hand(partitioner, shape, expected):
    assert partitioner(shape, "float32") == expected


@pytest.mark.kills("partitioners_count_bytes_of_the_dtype")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int4", 1),
        ("bool", 1),
        ("complex64", 8),
        ("torch.float16", 2),
        ("string", 16),
        (np.float64, 8),
        (np.bool_, 1),
        (np.dtype("U7"), 16),
        (np.dtype(object), 16),
        (ml_dtypes.bfloat16, 2),
        (np.dtype(ml_dtypes.bfloat16), 2),
        (float, 4),
    ],
)
def test_any_dtype_has_its_size(dtype, size):
    assert MinSizePartitioner(1, max_shards=100)((100,), dtype) == [100]
    assert MinSizePartitioner(size, max_shards=1000)((100,), dtype) == [100]
    assert MaxSizePartitioner(10 * size)((100,), dtype) == [10]
    assert MaxSizePartitioner(10 * size - 1)((100,), dtype) == [12]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards=0"),
        (lambda: FixedShardsPartitioner(2.5), "num_shards=2.5"),
        (lambda: FixedShardsPartitioner(True), "num_shards=True"),
        (lambda: MinSizePartitioner(0), "min_shard_bytes=0"),
        (lambda: MinSizePartitioner(float("nan")), "min_shard_bytes=nan"),
        (lambda: MinSizePartitioner(max_shards=-1), "max_shards=-1"),
        (lambda: MaxSizePartitioner("4"), "max_shard_bytes='4'"),
        (lambda: MaxSizePartitioner(4, max_shards=-2), "max_shards=-2"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=0), "bytes_per_string=0"),
        (lambda: FixedShardsPartitioner(2)((), "float32"), "shape=(), axis=0"),
        (lambda: MinSizePartitioner()((2, 3), "float32", axis=2), "axis=2"),
        (lambda: MaxSizePartitioner(4)((None, 3), "float32"), "(None, 3)"),
        (lambda: MaxSizePartitioner(4)((2, 3), "quaternion"), "dtype='quaternion'"),
    ],
)
def test_what_cannot_be_is_named(wrong, named):
    with pytest.raises(ValueError) as error:
        wrong()
    assert named in str(error.value)


def test_the_base_class_leaves_it_open():
    with pytest.raises(NotImplementedError):
        Partitioner()((2,), "float32")
