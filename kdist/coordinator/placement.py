"""Which rows of a variable are in which part, and which server holds it. Arithmetic alone."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.arrays.memory import aligned_empty
from kdist.arrays.splitting import even_split
from kdist.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Those of some rows of a variable that one part has.

    Args:
        shard: Which part.
        positions: Where they stand among the rows that were asked for; 1-D, ascending.
        rows: Which rows of the part they are, of the same length.
    """

    shard: int
    positions: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a variable is: in one or several parts, each of them on a server.

    Args:
        shape: The variable's shape.
        spans: The first row of each part, and the one after its last. A scalar counts as one row.
        servers: The number of the server that holds each part.
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    servers: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """How many parts there are."""
        return len(self.spans)

    @property
    def shard_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part."""
        if not self.shape:
            return [()]
        return [(stop - start, *self.shape[1:]) for start, stop in self.spans]

    def cut(self, array: np.ndarray) -> list[np.ndarray]:
        """Cuts an array of the variable's shape into its parts, without copying.

        Raises:
            InvalidArgumentError: If it has another shape.
        """
        self._check(array.shape, self.shape, "The shape of the array differs from the shape of the variable.")
        return [array] if self.num_shards == 1 else [array[start:stop] for start, stop in self.spans]

    def join(self, shards: Sequence[np.ndarray]) -> np.ndarray:
        """Joins the parts to an array of the variable's shape; the only part is returned as it is.

        Raises:
            InvalidArgumentError: If there are others, or they have other shapes.
        """
        self._check(
            [part.shape for part in shards],
            self.shard_shapes,
            "The shapes of the parts differ from the shapes of the variable's shards.",
        )
        if self.num_shards == 1:
            return shards[0]
        return np.concatenate(shards, out=aligned_empty(self.shape, shards[0].dtype))

    def rows_by_shard(self, ids: Any) -> list[Rows]:
        """Says which of some rows are in which part. Parts that have none of them are left out.

        Args:
            ids: The numbers of rows: integers, 1-D, in any order. A number may be there several times.

        Raises:
            InvalidArgumentError: If they are no such numbers, or the variable has no such row.

        Example:

        >>> from kdist.coordinator.placement import place
        >>> placement = place((10, 3), "float32", lambda shape, dtype: [2, 1], num_servers=2)
        >>> [(found.shard, found.positions.tolist(), found.rows.tolist())
        ...  for found in placement.rows_by_shard([7, 0, 5, 0])]
        [(0, [1, 3], [0, 0]), (1, [0, 2], [2, 0])]
        """
        ids = np.asarray(ids)
        ids = ids.astype(np.int64) if ids.size == 0 else ids
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not self.shape:
            raise InvalidArgumentError(
                "The row numbers are not a one-dimensional array of integers."
                if self.shape
                else "A scalar variable has no rows.",
                received={"shape of ids": ids.shape, "dtype": str(ids.dtype), "variable": self.shape},
                hint="Pass integers such as [0, 3, 7], and a variable with at least one dimension.",
            )
        if ids.size and (ids.min() < 0 or ids.max() >= self.shape[0]):
            raise InvalidArgumentError(
                f"Row numbers are out of range: the variable has {self.shape[0]} rows, and row numbers start at 0.",
                received={"lowest": int(ids.min()), "highest": int(ids.max()), "rows": self.shape[0]},
                hint="Check the input_dim of the embedding layer, and the IDs in your data.",
            )
        starts = np.array([start for start, _ in self.spans])
        shards = np.searchsorted(starts, ids, side="right") - 1
        found = []
        for shard in np.unique(shards).tolist():
            positions = np.flatnonzero(shards == shard)
            found.append(Rows(shard, positions, ids[positions] - starts[shard]))
        return found

    def join_rows(self, found: Sequence[Rows], parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        """Puts the rows that the parts have given into the order in which they were asked for.

        Args:
            found: What `rows_by_shard` has returned.
            parts: The rows of each of them: arrays whose first dimension is that of its `rows`.
            dtype: That of the rows, for the case that there are none.

        Returns:
            An array with a row for each number that was asked for.
        """
        joined = np.empty((sum(len(one.positions) for one in found), *self.shape[1:]), dtype)
        for one, part in zip(found, parts, strict=True):
            joined[one.positions] = part
        return joined

    def _check(self, received: Any, expected: Any, problem: str) -> None:
        if received != expected:
            raise InvalidArgumentError(
                problem,
                received={"shape": received, "expected": expected},
                hint="Pass arrays of the expected shape.",
            )


def place(
    shape: Sequence[int],
    dtype: Any,
    partitioner: Callable[..., Any] | None,
    num_servers: int,
    placed: int = 0,
) -> Placement:
    """Divides a variable, and gives its parts to the servers, as TensorFlow's strategy does.

    The rows are divided as evenly as they can be, the larger parts first, into no more parts than there are rows. The
    servers take turns, part after part and variable after variable. A scalar is not divided, nor is a variable without
    rows; the partitioner is not asked then.

    Args:
        shape: The variable's shape.
        dtype: Its dtype.
        partitioner: Called with `shape=` and `dtype=`; says into how many parts a variable is divided along each axis.
            It may be TensorFlow's. `None` divides nothing.
        num_servers: How many servers there are.
        placed: How many parts have been placed before.

    Raises:
        InvalidArgumentError: If the partitioner's answer cannot be: no part, less than none, what is no integer, or
            several parts along another axis than the first; or if there is no server.

    Example:

    >>> from kdist.coordinator.placement import place
    >>> place((10, 3), "float32", lambda shape, dtype: [4, 1], num_servers=3, placed=2)
    Placement(shape=(10, 3), spans=((0, 3), (3, 6), (6, 8), (8, 10)), servers=(2, 0, 1, 2))

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ParameterServerStrategy
    """
    if num_servers < 1:
        raise InvalidArgumentError(
            "The cluster has no parameter servers, so no task can store variables.",
            received={"num_servers": num_servers},
            hint="Start at least one server, for example: kdist run --num-ps 1 train.py",
        )
    shape = tuple(int(size) for size in shape)
    parts = 1
    if partitioner is not None and shape and shape[0] > 0:
        parts = min(_ask(partitioner, shape, dtype), shape[0])
    return Placement(
        shape,
        tuple(even_split(shape[0] if shape else 1, parts)),
        tuple((placed + shard) % num_servers for shard in range(parts)),
    )


def _ask(partitioner: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> int:
    """Returns into how many parts the first axis is divided."""
    if any(kind.__module__.startswith("tensorflow.") for kind in type(partitioner).__mro__):
        tf = sys.modules[
            "tensorflow"
        ]  # somebody has made a partitioner of it, and these know its types alone
        answer = partitioner(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype))
    else:
        answer = partitioner(shape=shape, dtype=dtype)
    try:
        partitions = [operator.index(parts) for parts in answer]
    except TypeError:
        partitions = []
    if not partitions or partitions[0] < 1 or math.prod(partitions[1:]) != 1 or min(partitions) < 1:
        raise InvalidArgumentError(
            "The partitioner did not return a valid number of parts per axis.",
            received={"partitioner": partitioner, "shape": shape, "returned": answer},
            hint="Return one integer per axis: at least 1 for the first axis, and 1 for each other axis.",
        )
    return partitions[0]
