"""Into how many parts a variable is divided over parameter servers: `tf.distribute.experimental.partitioners`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

from kdist.errors import InvalidArgumentError

# The dtypes whose names do not have their number of bits; those of Python are as in TensorFlow.
_SIZES = {"bool": 1, "half": 2, "double": 8, "float": 4, "int": 4, "resource": 1, "variant": 1}


class Partitioner:
    """Says into how many parts each variable is divided: what all partitioners derive from.

    A strategy with parameter servers asks it once for each variable that has a dimension. Variables are divided along
    their first axis alone, and the parts are as equal as they can be.

    Example:

    >>> from kdist.coordinator.partitioners import Partitioner
    >>> class Halves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if position == axis else 1 for position in range(len(shape))]
    >>> Halves()((10, 3), "float32")
    [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Says into how many parts a variable is divided.

        Args:
            shape: The variable's shape.
            dtype: Its dtype: the name, or that of NumPy or of a framework.
            axis: The axis along which it is divided.

        Returns:
            How many parts there are along each axis.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Divides each variable into the same number of parts, but never a row.

    Args:
        num_shards: How many parts.

    Raises:
        InvalidArgumentError: If it is not a positive integer.

    Example:

    >>> from kdist.coordinator.partitioners import FixedShardsPartitioner
    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _count("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Says into how many parts a variable is divided. See `Partitioner`."""
        sizes = _sizes(shape, axis)
        return _along(axis, min(self._num_shards, sizes[axis]), sizes)


class MinSizePartitioner(Partitioner):
    """Divides each variable into as many parts as there can be that are not too small.

    Args:
        min_shard_bytes: The least bytes of a part.
        max_shards: The most parts of a variable. Usually the number of servers.
        bytes_per_string: How many bytes a string counts for.

    Raises:
        InvalidArgumentError: If one of them is not positive.

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
        self._max_shards = _count("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Says into how many parts a variable is divided. See `Partitioner`."""
        sizes = _sizes(shape, axis)
        parts = math.ceil(math.prod(sizes) * _bytes_of(dtype, self._bytes_per_string) / self._min_shard_bytes)
        return _along(axis, max(1, min(sizes[axis], self._max_shards, parts)), sizes)


class MaxSizePartitioner(Partitioner):
    """Divides each variable into as few parts as there can be that are not too large.

    A row is not divided, so that parts of one row may be larger, and so may all of them where there would be more than
    `max_shards`.

    Args:
        max_shard_bytes: The most bytes of a part.
        max_shards: The most parts of a variable; `None` for as many as it takes.
        bytes_per_string: How many bytes a string counts for.

    Raises:
        InvalidArgumentError: If one of them is not positive.

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
        # As in TensorFlow, where 0 is no limit either.
        self._max_shards = _count("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Says into how many parts a variable is divided. See `Partitioner`."""
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


def _sizes(shape: Any, axis: int) -> tuple[int, ...]:
    """Returns a shape, of TensorFlow's too, as integers, and sees that it has the axis."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except (TypeError, ValueError):  # TensorFlow's error for a shape that is not known at all
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


def _bytes_of(dtype: Any, bytes_per_string: int) -> int:
    """Returns how many bytes one element has, as TensorFlow counts them, whose DTypes are but one kind of a dtype."""
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
    return _SIZES[name] if bits is None else max(1, int(bits[0]) // 8)  # a byte for int4 as well


def _count(name: str, value: Any) -> int:
    """Returns a number of parts, which must be an integer of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or type(value).__name__.startswith("bool"):  # NumPy's, too
        raise InvalidArgumentError(
            f"`{name}` is not a positive integer.",
            received={name: value},
            hint=f"Pass a positive integer, for example {name}=2.",
        )
    return number


def _positive(name: str, value: Any) -> Any:
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
