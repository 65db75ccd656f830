"""Creates distributed datasets and values for the methods of `Strategy`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kdist.backends.contract import Runtime
from kdist.backends.messages import check_equal, gather, of_chief, read_on_all
from kdist.data.agreement import open_steps
from kdist.data.distributed_dataset import DistributedDataset
from kdist.data.input_context import InputContext, ValueContext
from kdist.data.input_options import AutoShardPolicy, InputOptions, InputReplicationMode
from kdist.data.reading import WorkerBatch, read_global, read_per_replica, read_pieces
from kdist.data.sources import source_of
from kdist.data.sources.source import Source
from kdist.errors import InvalidArgumentError, check_function
from kdist.values import regroup

if TYPE_CHECKING:
    from kdist.arrays.types import Structure


def distribute_dataset(runtime: Runtime, dataset: object, options: InputOptions) -> DistributedDataset:
    """Distributes a dataset of global batches according to its policy. All workers must call it."""
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InvalidArgumentError(
            "experimental_distribute_dataset does not support one pipeline per replica.",
            received={"experimental_replication_mode": options.experimental_replication_mode},
            hint="Use `distribute_datasets_from_function`.",
        )

    def prepare() -> tuple[Source, AutoShardPolicy, int | None]:
        source = source_of(dataset)
        policy: AutoShardPolicy = options.auto_shard_policy or source.policy
        if runtime.num_workers == 1 and policy is not AutoShardPolicy.HINT:
            return source, AutoShardPolicy.DATA, source.num_batches
        if policy is AutoShardPolicy.AUTO:
            policy = AutoShardPolicy.FILE if source.reads_files else AutoShardPolicy.DATA
        if policy is AutoShardPolicy.FILE:
            source = source.share_of_files(runtime.num_workers, runtime.worker_index)
        elif policy is AutoShardPolicy.HINT:
            source = source.hinted(runtime.num_workers, runtime.worker_index)
        return source, policy, source.num_batches if policy is AutoShardPolicy.DATA else None

    source, policy, num_batches = read_on_all(runtime, "Distributing the dataset", prepare)
    is_global = policy is AutoShardPolicy.DATA
    facts = {"kind": source.kind, "policy": policy.name}
    check_equal(runtime, "distributed dataset", facts, "Create the dataset in the same way on every worker.")
    if is_global:
        _share_seed(runtime, source)
    read = read_global if is_global else read_pieces
    num_steps = _longest(runtime, num_batches) if is_global else None
    pipelines = 1 if is_global else runtime.num_workers
    read = functools.partial(read, source)
    return _dataset(runtime, [source], read, num_steps, options, pipelines, is_global)


def distribute_from_function(
    runtime: Runtime, dataset_fn: Callable[[InputContext], object], options: InputOptions
) -> DistributedDataset:
    """Distributes pipelines of per-replica batches, which a function creates. All workers must call it."""
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and runtime.num_workers > 1:
        raise InvalidArgumentError(
            "InputReplicationMode.PER_REPLICA does not support several workers.",
            received={"num_workers": runtime.num_workers},
            hint="Use InputReplicationMode.PER_WORKER.",
        )
    hint = "For a dataset, call strategy.experimental_distribute_dataset(dataset)."
    check_function("dataset_fn", dataset_fn, hint)
    pipelines = runtime.num_replicas if per_replica else runtime.num_workers
    mine = range(runtime.num_replicas) if per_replica else [runtime.worker_index]

    def call() -> tuple[list[Source], int | None, bool]:
        contexts = [InputContext(pipelines, i, runtime.num_replicas) for i in mine]
        sources = [source_of(dataset_fn(context)) for context in contexts]
        are_unbatched = all(source.is_unbatched for source in sources)  # some kinds read the first element
        return sources, _steps_of(sources, len(runtime.devices)), are_unbatched

    sources, num_steps, are_unbatched = read_on_all(runtime, "The dataset_fn", call)
    num_steps = _longest(runtime, num_steps, are_unbatched)
    read = functools.partial(read_per_replica, sources)
    return _dataset(runtime, sources, read, num_steps, options, pipelines)


def _dataset(
    runtime: Runtime,
    sources: Sequence[Source],
    read: Callable[[Runtime, int, int], Iterator[WorkerBatch]],
    num_steps: int | None,
    options: InputOptions,
    num_pipelines: int,
    is_global: bool = False,
) -> DistributedDataset:
    if not all(source.can_read_ahead for source in sources):  # the user may continue to use a generator
        options = dataclasses.replace(options, experimental_per_replica_buffer_size=0)
    return DistributedDataset(
        runtime,
        lambda epoch, start: open_steps(runtime, read(runtime, epoch, start), options, is_global, start),
        kind=sources[0].kind,
        num_steps=num_steps,
        is_infinite=any(source.is_infinite for source in sources),
        inner_shapes=sources[0].inner_shapes,
        sources=sources,
        num_pipelines=num_pipelines,
    )


def distribute_values(runtime: Runtime, value_fn: Callable[[ValueContext], Structure]) -> Structure:
    """Calls the user's function once per local replica, and returns the values."""
    values = [value_fn(ValueContext(i, runtime.num_replicas)) for i in runtime.replica_ids]
    return regroup(values)


def _steps_of(sources: Sequence[Source], num_local: int) -> int | None:
    lengths = [source.num_batches for source in sources]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    if len(known) > 1:
        return min(known) if sources[0].is_unbatched else max(known)
    steps, left = divmod(known[0], num_local)
    return steps + (left > 0 and not sources[0].is_unbatched)


def _longest(runtime: Runtime, num_steps: int | None, is_unbatched: bool = False) -> int | None:
    """Returns the steps of the longest pipeline (single elements: the shortest), or `None` if unknown."""
    everyone, unbatched = zip(*gather(runtime, [num_steps, is_unbatched]), strict=True)
    if None in everyone:
        return None
    return min(everyone) if any(unbatched) else max(everyone)


def _share_seed(runtime: Runtime, source: Source) -> None:
    """Sends the chief's seed to all workers, if the order of the dataset depends on a seed."""
    seed = of_chief(runtime, getattr(source, "seed", None))
    if seed is not None:
        source.seed = seed  # type: ignore[attr-defined]
