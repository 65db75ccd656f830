"""Reads the data of one worker for each step, according to the policy of the dataset."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras

from kdist.arrays import rows
from kdist.arrays.splitting import even_split, have_all_rows
from kdist.backends.contract import Runtime
from kdist.data.sources.source import Source
from kdist.errors import DatasetError

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

# Replaces the number of rows for a single element, which has no row axis.
SINGLE = -1


@dataclass
class WorkerBatch:
    """The data that one worker has read for one step.

    It contains either `parts`, or `whole` if replicas may need the whole global batch.

    Args:
        counts: The rows of each local part, or `SINGLE`. For a global batch, only its total number of rows.
        parts: One batch per local replica, or `None` for a replica without rows.
        whole: The global batch.
        is_placed: Whether `Runtime.place` has copied `parts` to the devices.
    """

    counts: list[int]
    parts: Sequence[Structure] | None = None
    whole: Structure = None
    is_placed: bool = False

    @functools.cached_property
    def kind_digest(self) -> int:
        return zlib.crc32(repr(self.kind()).encode())

    def kind(self) -> list[str]:
        """Returns the structure with dtypes, and the inner shapes, which the workers compare."""
        batch = self.whole
        if batch is None:
            assert self.parts is not None
            batch = next(part for part in self.parts if part is not None)
        structure = keras.tree.map_structure(
            lambda leaf: None if leaf is None else rows.dtype_name(leaf), batch
        )
        is_single = SINGLE in self.counts
        inner = 0 if is_single else 1
        # The rows of a ragged tensor vary in length.
        shapes = [tuple(leaf.shape[inner:]) for leaf in rows.leaves_of(batch) if not rows.is_ragged(leaf)]
        return [("one element of " if is_single else "") + repr(structure), repr(shapes)]


def read_global(source: Source, runtime: Runtime, epoch: int, start: int) -> Iterator[WorkerBatch]:
    """Reads global batches, which are equal on all workers, and keeps the rows of this worker's replicas."""

    def choose(count: int) -> tuple[int, int] | None:
        split = runtime.split(count)
        if have_all_rows(split) and runtime.num_replicas > 1:
            return None
        return split[runtime.replica_ids[0]][0], split[runtime.replica_ids[-1]][1]

    for count, part, whole in source.chosen(epoch, start, choose):
        if count == 0:
            continue
        chosen = choose(count)
        if chosen is None or (whole is not None and runtime.needs_equal_shapes and rows.has_sparse(whole)):
            yield WorkerBatch([count], whole=whole)
            continue
        if part is None:
            (part,) = rows.cut(whole, [chosen])
        first, last = chosen
        _check_chosen(part, last - first)
        split = [runtime.split(count)[i] for i in runtime.replica_ids]
        yield WorkerBatch([count], parts=rows.cut(part, [(a - first, b - first) for a, b in split]))


def _check_chosen(part: Structure, expected: int) -> None:
    if (found := rows.num_rows(part)) != expected:
        raise DatasetError(
            "The collate_fn of the DataLoader did not return one row per sample.",
            received={"samples": expected, "rows": found},
            hint="Distribute this loader with `distribute_datasets_from_function`.",
        )


def read_pieces(source: Source, runtime: Runtime, epoch: int, start: int) -> Iterator[WorkerBatch]:
    """Reads the global batches in this worker's share of the data, and cuts them into steps.

    In each step, the replicas get as many rows as from a shared global batch of B rows. One batch therefore
    lasts for as many steps as there are workers. If B is not divisible by the number of replicas, the workers
    take turns with the larger parts. Together, they have B rows in every step, as in `tf.distribute`.
    """
    sizes: list[int] = []
    num_local = len(runtime.devices)
    skip = start
    for batch in source.batches(epoch):
        host = rows.to_host(batch)
        count = rows.num_rows(host)
        if not count:
            continue
        if not sizes:
            # The first file may be smaller than a batch, but each replica needs at least one row.
            split = even_split(max(count, runtime.num_replicas), runtime.num_replicas)
            sizes = [stop - begin for begin, stop in split]
            first = runtime.replica_ids[0]
            sizes = sizes[first:] + sizes[:first]
        turns = itertools.cycle(range(0, runtime.num_replicas, num_local))
        end = 0
        while end < count:
            turn = next(turns)
            bounds = [end]
            for size in sizes[turn : turn + num_local]:
                bounds.append(min(bounds[-1] + size, count))
            end = bounds[-1]
            if skip:
                skip -= 1
                continue
            yield _of_parts(rows.cut(host, list(itertools.pairwise(bounds))))


def read_per_replica(
    sources: Sequence[Source], runtime: Runtime, epoch: int, start: int
) -> Iterator[WorkerBatch]:
    """Reads one batch per replica, from one pipeline in turn or from one pipeline per replica.

    If the dataset is not batched, each replica gets a single element. Elements cannot be shared like rows, so
    the data end before a step in which a replica would have no element, as in `tf.distribute`.
    """
    if len(sources) == 1:
        batches = sources[0].batches(epoch, start * len(runtime.devices))
        pipelines = [batches] * len(runtime.devices)
    else:
        pipelines = [source.batches(epoch, start) for source in sources]
    for parts in itertools.zip_longest(*pipelines):
        batch = _of_parts([None if part is None else rows.to_host(part) for part in parts])
        if is_cut_short(batch.counts):
            return
        if any(batch.counts):
            yield batch


def is_cut_short(counts: Sequence[int]) -> bool:
    """Returns whether some replicas have a single element in a step and others have none."""
    return SINGLE in counts and 0 in counts


def _of_parts(parts: Sequence[Structure]) -> WorkerBatch:
    counts = [
        0 if part is None else SINGLE if rows.is_single(part) else rows.num_rows(part) for part in parts
    ]
    if SINGLE in counts and max(counts) > 0:
        raise DatasetError(
            "The dataset contains both batches and single elements.",
            received={"shapes": [[leaf.shape for leaf in rows.leaves_of(p)] for p in parts if p is not None]},
            hint="Batch all elements: dataset.batch(64)",
        )
    return WorkerBatch(counts, parts=[p if n else None for p, n in zip(parts, counts, strict=True)])
