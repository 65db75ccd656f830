"""Computes the rows of each part of a variable, and the server that holds the part."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np

from kdist.arrays.memory import aligned_empty
from kdist.arrays.splitting import even_split
from kdist.backends.coordination import number_of_parts
from kdist.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Rows:
    """The requested rows of a variable that are in one part."""

    shard: int  # the index of the part
    positions: np.ndarray  # of these rows in the request; 1-D, ascending
    rows: np.ndarray  # their numbers within the part, of the same length


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of a variable, which consists of one or more parts, each on one server."""

    shape: tuple[int, ...]
    # The first row of each part, and its last row plus one. A scalar counts as one row.
    spans: tuple[tuple[int, int], ...]
    servers: tuple[int, ...]  # the index of the server that holds each part

    @property
    def num_shards(self) -> int:
        """The number of parts."""
        return len(self.spans)

    @property
    def shard_shapes(self) -> list[tuple[int, ...]]:
        if not self.shape:
            return [()]
        return [(stop - start, *self.shape[1:]) for start, stop in self.spans]

    def cut(self, array: np.ndarray) -> list[np.ndarray]:
        """Splits an array of the variable's shape into its parts, without copying.

        Raises:
            InvalidArgumentError: If the array has another shape.
        """
        self._check(array.shape, self.shape, "The shape of the array differs from the shape of the variable.")
        return [array] if self.num_shards == 1 else [array[start:stop] for start, stop in self.spans]

    def join(self, shards: Sequence[np.ndarray]) -> np.ndarray:
        """Joins the parts into an array of the variable's shape. A single part is returned without copying.

        Raises:
            InvalidArgumentError: If the number of parts or their shapes differ.
        """
        self._check(
            [part.shape for part in shards],
            self.shard_shapes,
            "The shapes of the parts differ from the shapes of the variable's shards.",
        )
        if self.num_shards == 1:
            return shards[0]
        return np.concatenate(shards, out=aligned_empty(self.shape, shards[0].dtype))

    def rows_by_shard(self, ids: Sequence[int] | np.ndarray) -> list[Rows]:
        """Groups row numbers by part. Parts without any of the rows are omitted.

        The numbers are a 1-D array of integers, in any order, possibly repeated.

        Raises:
            InvalidArgumentError: If `ids` is not such an array, or a row number is out of range.

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

    def join_rows(
        self, found: Sequence[Rows], parts: Sequence[np.ndarray], dtype: str | np.dtype
    ) -> np.ndarray:
        """Joins rows in the order of the request. `parts` has one array for each entry of `rows_by_shard`."""
        joined = np.empty((sum(len(one.positions) for one in found), *self.shape[1:]), dtype)
        for one, part in zip(found, parts, strict=True):
            joined[one.positions] = part
        return joined

    def _check(self, received: object, expected: object, problem: str) -> None:
        if received != expected:
            raise InvalidArgumentError(
                problem,
                received={"shape": received, "expected": expected},
                hint="Pass arrays of the expected shape.",
            )


def place(
    shape: Sequence[int],
    dtype: object,
    partitioner: Callable[..., Sequence[int]] | None,
    num_servers: int,
    placed: int = 0,
) -> Placement:
    """Splits a variable into parts and assigns them to servers, as TensorFlow's strategy does.

    The rows are split as evenly as possible, with the larger parts first. There are at most as many parts as
    rows. Parts are assigned to the servers in turn, across all variables, after `placed` earlier parts. Scalars
    and variables without rows are not split, and the partitioner is not called for them. It is called with
    `shape=` and `dtype=`, and returns the number of parts along each axis. It can be a partitioner of TensorFlow.

    Raises:
        InvalidArgumentError: If there are no servers, or the partitioner does not return positive integers,
            or it splits an axis other than the first.

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


def _ask(partitioner: Callable[..., Sequence[int]], shape: tuple[int, ...], dtype: object) -> int:
    """Returns the number of parts along the first axis."""
    if any(kind.__module__.startswith("tensorflow.") for kind in type(partitioner).__mro__):
        # TensorFlow's partitioners accept only its types. They exist, so TensorFlow has been imported.
        tf = sys.modules["tensorflow"]
        answer = partitioner(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype))
    else:
        answer = partitioner(shape=shape, dtype=dtype)
    return number_of_parts(answer, shape, partitioner)
