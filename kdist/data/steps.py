"""`Steps`: the workers agree, step by step, on who still has data and how much."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist.backends.contract import ReplicaBatches
from kdist.backends.messages import gather
from kdist.data import rows
from kdist.data.exchange import empty_parts, gather_rows
from kdist.data.prefetch import End, Prefetch
from kdist.data.reading import WorkerBatch
from kdist.errors import DatasetError, KdistError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


@dataclass
class Step:
    """One step's data, as all workers know it.

    Args:
        batch: What this worker has read; `None` if its pipeline has ended.
        counts: Rows of all replicas, in their order.
    """

    batch: WorkerBatch | None
    counts: list[int]


class Steps:
    """The steps of one pass over a distributed dataset. All workers must iterate in the same order.

    Each worker says how many rows it has in each of the steps that are ready; the steps for which all have
    spoken are run without another message. So a fast pipeline costs one message for several steps.

    Args:
        runtime: The runtime whose workers take part.
        pipeline: What this worker reads.
        is_global: Whether the workers read the same global batches, or each its own part.
        start: Index of the first step, for messages.
    """

    def __init__(self, runtime: Runtime, pipeline: Prefetch, is_global: bool, start: int = 0) -> None:
        self._runtime = runtime
        self._pipeline = pipeline
        self._is_global = is_global
        self._step = start
        self._read: list[Any] = []

    def __iter__(self) -> Iterator[Step]:
        while True:
            self._read += self._pipeline.take()
            everyone = gather(self._runtime, self._message())
            agreed = self._agreed(everyone)
            if agreed == 0:
                return
            for i in range(agreed):
                counts = [c for worker in everyone for c in self._counts(worker["counts"], i)]
                item = self._read[0]
                batch = None if isinstance(item, End) else self._read.pop(0)
                step = Step(batch, self._checked(counts))
                self._step += 1
                yield step

    def close(self) -> None:
        """Ends the pipeline of this worker."""
        self._pipeline.close()

    def _message(self) -> dict[str, Any]:
        batches = [item.counts for item in self._read if not isinstance(item, End)]
        end = self._read[-1] if isinstance(self._read[-1], End) else None
        # Taken again with each call: one is enough.
        self._read = [item for item in self._read if not isinstance(item, End)] + ([end] if end else [])
        error = end.error if end else None
        return {
            "counts": batches,
            "ended": end is not None,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def _agreed(self, everyone: list[dict[str, Any]]) -> int:
        """How many steps can be run before the workers must speak again; 0 at the end."""
        for index, worker in enumerate(everyone):
            if worker["error"] is not None and not worker["counts"]:
                self._raise(index, worker["error"])
        waiting = [len(w["counts"]) for w in everyone if not w["ended"] or w["error"] is not None]
        return min(waiting) if waiting else max(len(w["counts"]) for w in everyone)

    def _raise(self, index: int, said: str) -> None:
        mine = self._read[0].error if isinstance(self._read[0], End) else None
        if self._runtime.num_workers == 1 and isinstance(mine, KdistError):
            raise mine
        raise DatasetError(
            f"The dataset of worker {index} failed in step {self._step}: {said}",
            received={"worker": self._runtime.worker_index},
            hint="" if "Received:" in said else "Look at that worker's traceback.",
        ) from mine

    def _counts(self, of_worker: list[list[int]], step: int) -> list[int]:
        if step < len(of_worker):
            return of_worker[step]
        return [0] if self._is_global else [0] * len(self._runtime.devices)

    def _checked(self, counts: list[int]) -> list[int]:
        if not self._is_global:
            return counts
        if len(set(counts)) > 1:
            differing = next(i for i, n in enumerate(counts) if n != counts[0])
            raise WorkerMismatchError(
                f"All workers must be given the same dataset, but in step {self._step} worker 0 has a global "
                f"batch of {counts[0]} rows and worker {differing} one of {counts[differing]}.",
                received={"rows": counts},
                hint="Give every worker the same global batches, in the same order: kdist takes each worker's "
                "share.",
            )
        return [stop - first for first, stop in rows.even_split(counts[0], self._runtime.num_replicas)]


def as_batch(runtime: Runtime, step: Step) -> Any:
    """Returns what a step function takes: the replicas' parts where they are equal, else the global batch."""
    if step.batch is not None and step.batch.whole is not None:
        return step.batch.whole
    parts = _parts(runtime, step)
    if len(set(step.counts)) == 1:
        return ReplicaBatches(parts, step.counts[0])
    return gather_rows(runtime, parts)


def as_parts(runtime: Runtime, step: Step) -> list[Any]:
    """Returns one batch for each local replica, of no rows where a replica has none."""
    if step.batch is not None and step.batch.whole is not None:
        bounds = list(itertools.accumulate(step.counts, initial=0))
        return [rows.take(step.batch.whole, bounds[i], bounds[i + 1]) for i in runtime.replica_ids]
    parts = _parts(runtime, step)
    return empty_parts(runtime, parts) if 0 in step.counts else list(parts)


def _parts(runtime: Runtime, step: Step) -> Sequence[Any]:
    if step.batch is None or step.batch.parts is None:
        return [None] * len(runtime.devices)
    return step.batch.parts
