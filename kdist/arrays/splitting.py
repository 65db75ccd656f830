"""Which rows of a global batch each replica has: the one place that decides it.

On JAX, of a batch that every replica has whole, the program of the step divides the rows (`JaxCore.divide`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def even_split(rows: int, replicas: int) -> list[tuple[int, int]]:
    """Splits the rows of a global batch over the replicas: as even as possible, the larger parts first.

    As TensorFlow rebatches full batches (`experimental_distribute_dataset`): some replicas get
    ⌈rows / replicas⌉ rows and the others ⌊rows / replicas⌋. Short last batches are split likewise.

    Example:

    >>> from kdist.arrays.splitting import even_split
    >>> even_split(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    size, larger = divmod(rows, replicas)
    bounds = [i * size + min(i, larger) for i in range(replicas + 1)]
    return list(itertools.pairwise(bounds))


def split_rows(num_rows: int, num_replicas: int, equally: bool = False) -> list[tuple[int, int]]:
    """Says which rows of a global batch each replica has in the step of a model: a pair (start, stop) for each.

    Those of `even_split`; all rows for each replica where there are too few for all, or where all replicas need the
    same number and they cannot be split equally. See `have_all_rows`.

    Example:

    >>> from kdist.arrays.splitting import split_rows
    >>> split_rows(32, 3), split_rows(2, 3)
    ([(0, 11), (11, 22), (22, 32)], [(0, 2), (0, 2), (0, 2)])
    """
    if num_rows < num_replicas or (equally and num_rows % num_replicas):
        return [(0, num_rows)] * num_replicas
    return even_split(num_rows, num_replicas)


def have_all_rows(split: Sequence[tuple[int, int]]) -> bool:
    """Says whether `split_rows` gives every replica the whole batch; so it does to the only one."""
    return split[0] == split[-1]
