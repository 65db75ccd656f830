"""The partitioners of `tf.distribute.experimental.partitioners`, which split variables over servers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kdist.errors import InvalidArgumentError, check_whole

# Bytes of dtypes whose names do not contain the number of bits. `float` and `int` are as in TensorFlow.
_SIZES = {"bool": 1, "half": 2, "double": 8, "float": 4, "int": 4, "resource": 1, "variant": 1}
_HINT = "Pass the maximum number of parts, for example max_shards=2."


class Partitioner:
    """Base class of all partitioners, which decide into how many parts a variable is split.

    `ParameterServerStrategy` calls the partitioner once for each variable that is not a scalar. It splits
    variables only along their first axis, into parts whose sizes are as equal as possible.

    Example:

    >>> from kdist.coordinator.partitioners import Partitioner
    >>> class Halves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if position == axis else 1 for position in range(len(shape))]
    >>> Halves()((10, 3), "float32")
    [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        """Returns the number of parts of a variable along each axis.

        Args:
            shape: The shape of the variable.
            dtype: The dtype of the variable: a name, or a dtype object of NumPy or of a framework.
            axis: The axis along which the variable is split.

        Returns:
            A list with the number of parts along each axis.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Splits each variable into the same number of parts, but not into more parts than it has rows.

    Args:
        num_shards: The number of parts.

    Raises:
        InvalidArgumentError: If `num_shards` is not a positive integer.

    Example:

    >>> from kdist.coordinator.partitioners import FixedShardsPartitioner
    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = check_whole(
            "num_shards", num_shards, "Pass the number of parts, for example num_shards=2."
        )

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        """Returns the number of parts of a variable along each axis. See `Partitioner`."""
        sizes = _sizes(shape, axis)
        return _along(axis, min(self._num_shards, sizes[axis]), sizes)


class MinSizePartitioner(Partitioner):
    """Splits each variable into as many parts as possible, but not into parts below a minimum size.

    Args:
        min_shard_bytes: The minimum size of a part in bytes.
        max_shards: The maximum number of parts per variable, usually the number of servers.
        bytes_per_string: The number of bytes to count per string.

    Raises:
        InvalidArgumentError: If an argument is not positive.

    Example:

    >>> from kdist.coordinator.partitioners import MinSizePartitioner
    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=10)((6, 1), "float32")
    [6, 1]
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = check_whole("max_shards", max_shards, _HINT)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        """Returns the number of parts of a variable along each axis. See `Partitioner`."""
        sizes = _sizes(shape, axis)
        parts = math.ceil(math.prod(sizes) * _bytes_of(dtype, self._bytes_per_string) / self._min_shard_bytes)
        return _along(axis, max(1, min(sizes[axis], self._max_shards, parts)), sizes)


class MaxSizePartitioner(Partitioner):
    """Splits each variable into as few parts as possible, but not into parts above a maximum size.

    Rows are never split, so a part of one row can be larger. `max_shards` can also make parts larger.

    Args:
        max_shard_bytes: The maximum size of a part in bytes.
        max_shards: The maximum number of parts per variable; `None` for no limit.
        bytes_per_string: The number of bytes to count per string.

    Raises:
        InvalidArgumentError: If an argument is not positive.

    Example:

    >>> from kdist.coordinator.partitioners import MaxSizePartitioner
    >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
    [6, 1]
    >>> MaxSizePartitioner(max_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        # As in TensorFlow, 0 means no limit.
        self._max_shards = check_whole("max_shards", max_shards, _HINT) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: object, axis: int = 0) -> list[int]:
        """Returns the number of parts of a variable along each axis. See `Partitioner`."""
        sizes = _sizes(shape, axis)
        if not math.prod(sizes):
            return _along(axis, 1, sizes)
        row = math.prod(sizes) / sizes[axis] * _bytes_of(dtype, self._bytes_per_string)
        parts = math.ceil(sizes[axis] / max(1, math.floor(self._max_shard_bytes / row)))
        return _along(axis, min(self._max_shards or parts, parts), sizes)


def _along(axis: int, parts: int, sizes: Sequence[int]) -> list[int]:
    partitions = [1] * len(sizes)
    partitions[axis] = parts
    return partitions


def _sizes(shape: Iterable[SupportsIndex], axis: int) -> tuple[int, ...]:
    """Returns a shape (also a `tf.TensorShape`) as integers, and checks that the axis is in range."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except (TypeError, ValueError):  # TensorFlow raises a ValueError if the rank is unknown
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise InvalidArgumentError(
            "`shape` has unknown dimensions, so kdist cannot partition the variable.",
            received={"shape": shape},
            hint="Pass the size of each dimension, for example (10, 3).",
        )
    if not -len(sizes) <= axis < len(sizes):
        raise InvalidArgumentError(
            "`axis` is out of range for the shape of the variable.",
            received={"shape": sizes, "axis": axis},
            hint=f"Choose an axis from 0 to {len(sizes) - 1}." if sizes else "Do not partition scalars.",
        )
    return sizes


def _bytes_of(dtype: object, bytes_per_string: int) -> int:
    """Returns the number of bytes per element, as TensorFlow counts them, for a dtype of any framework."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    name = name.removeprefix("torch.").removesuffix("_ref").rstrip("_")
    if name == "object" or name.startswith(("str", "bytes")):
        return bytes_per_string
    bits = re.search(r"\d+", name)
    if name not in _SIZES and bits is None:
        raise InvalidArgumentError(
            "The size of `dtype` is unknown, so kdist cannot partition the variable by bytes.",
            received={"dtype": dtype},
            hint='Pass a numeric dtype, for example "float32".',
        )
    return _SIZES[name] if bits is None else max(1, int(bits[0]) // 8)  # int4 also counts as one byte


def _positive(name: str, value: int) -> int:
    try:
        right = value >= 1
    except TypeError:
        right = False
    if not right:
        raise InvalidArgumentError(
            f"`{name}` is not positive.",
            received={name: value},
            hint=f"Pass a number of bytes, for example {name}=1024.",
        )
    return value
