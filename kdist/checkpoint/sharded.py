"""Sharded variables in checkpoints: each worker writes and reads the parts that it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import keras
import numpy as np

from kdist.backends.contract import Runtime
from kdist.checkpoint import state
from kdist.checkpoint.checked_reading import Range, in_shape, read_ranges, read_tensors
from kdist.checkpoint.index import Index, Tensor
from kdist.checkpoint.shards import Size, Span, cut
from kdist.topology import LocalParts

# The size up to which sharded variables are gathered together. A larger variable is gathered by itself.
_GROUP_BYTES = 64 << 20


def divide(
    sources: Sequence[keras.Variable | np.ndarray],
    tensors: Sequence[Tensor],
    rank: int,
    num_members: int,
    num_shards: int,
    runtime: Runtime,
) -> tuple[list[Tensor], list[Span], dict[Span, Callable[[], np.ndarray]]]:
    """Divides the tensors of all sources over the workers of a directory, of which this is number `rank`.

    If each worker writes a shard, it writes the parts that it holds. Otherwise, the workers gather the variables.
    Returns the tensors, with the axes along which they are stored; this worker's spans; and functions that return
    the bytes of those spans that are not in this worker's variables.
    """
    local: dict[int, LocalParts] = {}
    if num_shards == num_members == runtime.num_workers:
        for number, source in enumerate(sources):
            if (parts := _local_parts(runtime, source)) is not None:
                local[number] = parts
    stored = [replace(t, axis=local[i].axis) if i in local else t for i, t in enumerate(tensors)]
    sizes = [Size(0, 1) if i in local else tensor.size for i, tensor in enumerate(tensors)]
    spans = cut(sizes, rank, num_shards) if rank < num_shards else []
    variables = [i for i, s in enumerate(sources) if i not in local and isinstance(s, keras.Variable)]
    known = _gather(sources, tensors, variables, spans, runtime)
    for number, parts in local.items():
        for part in parts.to_save:
            first, last = stored[number].elements_of(*part)
            known[Span(number, first, last)] = functools.partial(_along, parts.axis, parts.parts[part])
    return stored, sorted({*spans, *known}), known


def _local_parts(runtime: Runtime, source: object) -> LocalParts | None:
    """Returns this worker's parts of a sharded variable; `None` for other objects and without elements."""
    is_variable = isinstance(source, keras.Variable) and 0 not in source.shape
    return runtime.local_parts(source) if is_variable else None


def _along(axis: int, part: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the bytes of a part, with its axis first."""
    return np.ascontiguousarray(np.moveaxis(part(), axis, 0)).reshape(-1).view(np.uint8)


def _gather(
    sources: Sequence[keras.Variable | np.ndarray],
    tensors: Sequence[Tensor],
    variables: Sequence[int],
    spans: Sequence[Span],
    runtime: Runtime,
) -> dict[Span, Callable[[], np.ndarray]]:
    """Gathers groups of variables on all workers, and copies this worker's spans of each group."""
    found: dict[Span, Callable[[], np.ndarray]] = {}
    for group in _in_groups(variables, tensors):
        with runtime.kept_whole([sources[number] for number in sorted(group)]):
            for span in spans:
                if span.tensor in group:
                    found[span] = functools.partial(
                        np.asarray, state.bytes_of(sources[span.tensor], span).copy()
                    )
    return found


def _in_groups(variables: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[set[int]]:
    some: set[int] = set()
    size = 0
    for number in variables:
        if some and size + tensors[number].num_bytes > _GROUP_BYTES:
            yield some
            some, size = set(), 0
        some.add(number)
        size += tensors[number].num_bytes
    if some:
        yield some


@dataclass(frozen=True)
class Sharded:
    """A sharded variable and the tensor from which this worker restores its parts."""

    tensor: Tensor
    local: LocalParts


def match(runtime: Runtime | None, variables: Sequence[tuple[keras.Variable, Tensor]]) -> dict[str, Sharded]:
    """Returns the variables of which this worker needs only parts, by the names of their tensors."""
    if runtime is None or not runtime.divides_over_workers:
        return {}
    found = {tensor.name: (tensor, _local_parts(runtime, variable)) for variable, tensor in variables}
    return {name: Sharded(tensor, local) for name, (tensor, local) in found.items() if local is not None}


def read(
    path: str, index: Index, wanted: Mapping[str, Sharded], shown: bool = False
) -> dict[str, dict[tuple[int, int], np.ndarray]]:
    """Reads this worker's parts of tensors. Of tensors that are stored along another axis, holds one at a time."""
    found: dict[str, dict[tuple[int, int], np.ndarray]] = {name: {} for name in wanted}
    fitting = [each for each in wanted.values() if each.tensor.axis == each.local.axis]
    # Adjacent parts together, because a piece is always read whole.
    runs = [(each, run) for each in fitting for run in _adjacent(each.local.parts)]
    ranges = [Range(each.tensor, *each.tensor.elements_of(*run)) for each, run in runs]
    for (each, (first, last)), array in zip(runs, read_ranges(path, index, ranges, shown), strict=True):
        rows = in_shape(array, each.tensor)
        for start, stop in each.local.parts:
            if first <= start < last:
                cut = [slice(None)] * each.local.axis + [slice(start - first, stop - first)]
                found[each.tensor.name][start, stop] = rows[(*cut,)]
    for name, each in wanted.items():
        if each.tensor.axis != each.local.axis and each.local.parts:
            whole = read_tensors(path, index, [each.tensor])[name]
            before = [slice(None)] * each.local.axis
            found[name] = {part: whole[(*before, slice(*part))].copy() for part in each.local.parts}
    return found


def _adjacent(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins parts that follow one another."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
