"""Divides tensors into shards: concatenates their bytes, and gives each worker an equal part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# With many workers, a shard has at least `_LEAST_BYTES`, because a file system is slow with thousands of small files.
_FEW_SHARDS = 8
_LEAST_BYTES = 64 << 20


class Size(NamedTuple):
    """The size of a tensor: the number of elements and the bytes per element."""

    elements: int
    itemsize: int


class Span(NamedTuple):
    """A range of elements of one flattened tensor."""

    tensor: int  # position among all tensors
    first: int
    last: int  # one past the last element


def number_of_shards(num_bytes: int, num_workers: int) -> int:
    """Returns how many workers write a shard: up to 8, and more if each shard has at least 64 MiB.

    Example:

    >>> from kdist.checkpoint.shards import number_of_shards
    >>> number_of_shards(1 << 30, 4096)
    16
    """
    return min(num_workers, max(_FEW_SHARDS, math.ceil(num_bytes / _LEAST_BYTES)))


def cut(sizes: Sequence[Size], shard: int, num_shards: int) -> list[Span]:
    """Returns the spans of one shard. Shards have equal sizes, up to rounding to whole elements.

    Example:

    >>> from kdist.checkpoint.shards import Size, cut
    >>> cut([Size(3, 4), Size(2, 4)], 0, 2)
    [Span(tensor=0, first=0, last=2)]
    >>> cut([Size(3, 4), Size(2, 4)], 1, 2)
    [Span(tensor=0, first=2, last=3), Span(tensor=1, first=0, last=2)]
    """
    starts = [0, *itertools.accumulate(size.elements * size.itemsize for size in sizes)]
    begin = starts[-1] * shard // num_shards
    end = starts[-1] * (shard + 1) // num_shards
    spans = []
    for number, (size, start) in enumerate(zip(sizes, starts[:-1], strict=True)):
        # The shards on both sides of a boundary round it down to the same element.
        first = min(max(begin - start, 0) // size.itemsize, size.elements)
        last = min(max(end - start, 0) // size.itemsize, size.elements)
        if first < last:
            spans.append(Span(number, first, last))
    return spans
