"""Decides which rows of a global batch each replica gets.

On JAX, if every replica has the whole batch, the program of the step divides the rows (`JaxCore.divide`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def even_split(rows: int, replicas: int) -> list[tuple[int, int]]:
    """Splits the rows of a global batch over the replicas as evenly as possible, the larger parts first.

    TensorFlow splits full batches in the same way (`experimental_distribute_dataset`). Some replicas get
    ⌈rows / replicas⌉ rows and the others ⌊rows / replicas⌋. kdist also splits short last batches like this.

    Example:

    >>> from kdist.arrays.splitting import even_split
    >>> even_split(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    size, larger = divmod(rows, replicas)
    bounds = [i * size + min(i, larger) for i in range(replicas + 1)]
    return list(itertools.pairwise(bounds))


def split_rows(num_rows: int, num_replicas: int, equally: bool = False) -> list[tuple[int, int]]:
    """Returns a pair (start, stop) per replica: its rows of a global batch in the step of a model.

    The rows are split with `even_split`. However, every replica gets all rows if there are fewer rows than
    replicas, or if `equally` is set and the rows cannot be split equally. See `have_all_rows`.

    Example:

    >>> from kdist.arrays.splitting import split_rows
    >>> split_rows(32, 3), split_rows(2, 3)
    ([(0, 11), (11, 22), (22, 32)], [(0, 2), (0, 2), (0, 2)])
    """
    if num_rows < num_replicas or (equally and num_rows % num_replicas):
        return [(0, num_rows)] * num_replicas
    return even_split(num_rows, num_replicas)


def have_all_rows(split: Sequence[tuple[int, int]]) -> bool:
    """Returns whether `split_rows` gave every replica the whole batch, also for a single replica."""
    return split[0] == split[-1]
