"""How tensors are cut into shards: all of them as one row of bytes, of which every worker takes an equal part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Size(NamedTuple):
    """How large a tensor is: the number of its elements, and the bytes of one."""

    elements: int
    itemsize: int


class Span(NamedTuple):
    """Elements of one tensor, thought of as flat."""

    tensor: int  # its position among all tensors
    first: int
    last: int  # the one after the last


def cut(sizes: Sequence[Size], shard: int, num_shards: int) -> list[Span]:
    """Returns what one shard holds. Shards are equal to within the bytes of one element.

    Args:
        sizes: Of all tensors, in their order.
        shard: Which one, from 0.
        num_shards: How many there are.

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
        # Both shards of a boundary round it down to the same element.
        first = min(max(begin - start, 0) // size.itemsize, size.elements)
        last = min(max(end - start, 0) // size.itemsize, size.elements)
        if first < last:
            spans.append(Span(number, first, last))
    return spans
