"""Lets the workers agree on the number of rows in each step, and on the end of the data."""

from __future__ import annotations

import atexit
import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist.arrays import rows
from kdist.arrays.row_exchange import empty_parts, gather_rows
from kdist.arrays.splitting import even_split, have_all_rows
from kdist.backends.contract import ReplicaBatches, Runtime
from kdist.backends.messages import gather
from kdist.data.input_options import InputOptions
from kdist.data.prefetch import End, Prefetch, primed
from kdist.data.reading import SINGLE, WorkerBatch, is_cut_short
from kdist.errors import DatasetError, KdistError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

# The maximum number of steps per message. A fast worker holds as many batches while it waits for a slow one.
_MOST = 3
# The most batches that are read and not used. Two more batches wait in the queue, and the thread holds another one.
MOST_AHEAD = _MOST + 3
# A message costs as much as a small step, so a worker first waits up to _MOMENT seconds for a second batch.
# It does not wait longer, because the pipeline itself may be waiting for a step.
_FEW = 2
_MOMENT = 0.01
# The next message is sent when this many agreed steps are left. Messages travel while these steps run.
_LEFT = 1
# Seconds that the process waits at its exit for a read that has begun.
_PATIENCE_AT_EXIT = 1.0

_open: weakref.WeakSet[Steps] = weakref.WeakSet()


@dataclass
class Step:
    """The data of one step.

    Args:
        batch: The batch that this worker has read, or `None` if its pipeline has ended.
        counts: The number of rows of each replica over all workers, or `SINGLE`. Equal on all workers.
    """

    batch: WorkerBatch | None
    counts: list[int]

    def as_batch(self, runtime: Runtime) -> ReplicaBatches:
        """Returns batches for a step function. Gathers rows if `counts` differs from `runtime.split`."""
        batch = self.batch
        if batch is not None and batch.whole is not None:
            return split_batch(runtime, batch.whole)
        parts = self._parts(runtime)
        if SINGLE in self.counts:
            rows.num_rows(parts[0])  # raises
        split = runtime.split(sum(self.counts))
        if self.counts != [stop - start for start, stop in split]:
            return split_batch(runtime, gather_rows(runtime.group, parts))
        return ReplicaBatches(parts if batch is not None and batch.is_placed else runtime.place(parts), split)

    def as_parts(self, runtime: Runtime) -> list[Structure]:
        """Returns one batch per local replica, with zero rows for a replica without data."""
        if self.batch is not None and self.batch.whole is not None:
            split = even_split(sum(self.counts), runtime.num_replicas)
            return rows.cut(self.batch.whole, [split[i] for i in runtime.replica_ids])
        parts = self._parts(runtime)
        return empty_parts(runtime.group, parts) if 0 in self.counts else list(parts)

    def _parts(self, runtime: Runtime) -> Sequence[Structure]:
        if self.batch is None or self.batch.parts is None:
            return [None] * len(runtime.devices)
        return self.batch.parts


class Steps:
    """The steps of one pass over a distributed dataset. All workers must iterate in the same order.

    Each worker sends the row counts of the steps that it has ready. Steps that are ready on all workers run
    without another message. If all workers read faster than they train, the next message travels while steps
    run. A single worker sends no messages.

    Args:
        runtime: The runtime of the workers.
        pipeline: The pipeline that this worker reads.
        is_global: Whether all workers read the same global batches, instead of different batches.
        start: The index of the first step, for errors.
    """

    def __init__(self, runtime: Runtime, pipeline: Prefetch, is_global: bool, start: int = 0) -> None:
        self._runtime = runtime
        self._pipeline = pipeline
        self._is_global = is_global
        self._step = start
        self._read: list[Any] = []
        # Per step that may run: the rows of all replicas, and whether the workers' batches differ in kind.
        self._agreed: list[tuple[list[int], bool]] = []
        self._all_are_ahead = False
        self._waiting_pays = True
        self._on_its_way: Callable[[], list[bytes]] | None = None
        _open.add(self)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.next, None)

    def next(self) -> Step | None:
        """Returns the next step, or `None` at the end."""
        if self._runtime.num_workers == 1:
            return self._next_alone()
        has_heard = not self._agreed
        if has_heard:
            self._agree()
        if not self._agreed:
            return None
        counts, kinds_differ = self._agreed.pop(0)
        if is_cut_short(counts):
            return None
        if kinds_differ:
            self._compare_kinds()
        counts = self._checked(counts)
        batch = None if isinstance(self._read[0], End) else self._read.pop(0)
        self._step += 1
        if self._all_are_ahead:
            self._fill()
            # All workers send at the same step, because `_agreed` is equal, but not right after a message.
            if not has_heard and self._on_its_way is None and len(self._agreed) <= _LEFT:
                self._send(len(self._read) - len(self._agreed) < _FEW)
        return Step(batch, counts)

    def _next_alone(self) -> Step | None:
        if not self._read:
            self._read = self._pipeline.take(1)
        item = self._read[0]
        if isinstance(item, End):
            if item.error is not None:
                self._raise(0, _words(item.error))
            return None
        self._read.clear()
        step = Step(item, self._checked(item.counts))
        self._step += 1
        return step

    def close(self) -> None:
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is not None:
            with contextlib.suppress(Exception):
                on_its_way()  # the other workers have sent theirs, or are lost
        self._pipeline.close()

    def _agree(self) -> None:
        """Extends `_agreed` by the next steps for which all workers have data, or by none at the end."""
        while not self._agreed:
            if self._on_its_way is None:
                self._fill()
                waits = len(self._read) < _FEW
                if not self._read:
                    self._fill(wait=None)
                if len(self._read) < _FEW and self._waiting_pays:
                    self._fill(wait=_MOMENT)
                    self._waiting_pays = len(self._read) >= _FEW
                self._send(waits)
            assert self._on_its_way is not None
            received, self._on_its_way = self._on_its_way, None
            everyone = [json.loads(data) for data in received()]
            number = self._number_agreed(everyone)
            for i in range(number):
                counts = [c for worker in everyone for c in self._counts(worker["counts"], i)]
                kinds = {worker["kinds"][i] for worker in everyone if i < len(worker["kinds"])}
                self._agreed.append((counts, len(kinds) > 1))
            going = [worker for worker in everyone if not worker["ended"]]
            # Computed from the same messages, so equal on all workers.
            self._all_are_ahead = bool(going) and not any(worker["waits"] for worker in going)
            if not number and not going:
                return

    def _fill(self, wait: float | None = 0.0) -> None:
        """Takes ready batches, up to a limit. Waits up to `wait` seconds for the first (`None`: forever)."""
        if not (self._read and isinstance(self._read[-1], End)):
            self._read += self._pipeline.take(_MOST - len(self._read), wait)

    def _send(self, waits: bool) -> None:
        """Reports ready batches that are not agreed yet. `waits` means that fewer than `_FEW` were ready."""
        batches = [item for item in self._read[len(self._agreed) :] if not isinstance(item, End)]
        ended = bool(self._read) and isinstance(self._read[-1], End)
        error = self._read[-1].error if ended else None
        message = {
            "counts": [batch.counts for batch in batches],
            "kinds": [batch.kind_digest for batch in batches],
            "ended": ended,
            "waits": waits,
            "error": None if error is None else _words(error),
        }
        self._on_its_way = self._runtime.group.begin_gather_bytes(json.dumps(message).encode())

    def _number_agreed(self, everyone: list[dict[str, Any]]) -> int:
        """Returns how many steps can run before the next message."""
        for index, worker in enumerate(everyone):
            if worker["error"] is not None and not worker["counts"]:
                self._raise(index, worker["error"])
        waiting = [len(w["counts"]) for w in everyone if not w["ended"] or w["error"] is not None]
        return min(waiting) if waiting else max(len(w["counts"]) for w in everyone)

    def _raise(self, index: int, said: str) -> None:
        mine = self._read[0].error if self._read and isinstance(self._read[0], End) else None
        if self._runtime.num_workers == 1 and isinstance(mine, KdistError):
            raise mine
        raise DatasetError(
            f"The dataset of worker {index} failed in step {self._step + 1}: {said}",
            received={"failed_worker": index} if mine is None else {},
            hint="" if "Received:" in said else f"Read the traceback of worker {index}.",
        ) from mine

    def _counts(self, of_worker: list[list[int]], step: int) -> list[int]:
        if step < len(of_worker):
            return of_worker[step]
        return [0] if self._is_global else [0] * len(self._runtime.devices)

    def _compare_kinds(self) -> None:
        """Raises an error if the workers' next batches would lead to different programs."""
        mine = None if isinstance(self._read[0], End) else self._read[0].kind()
        everyone = enumerate(gather(self._runtime, mine))
        present = [(index, kind) for index, kind in everyone if kind is not None]
        first, (expected, expected_shapes) = present[0]
        for index, (structure, shapes) in present[1:]:
            differ = structure != expected
            if differ or (shapes != expected_shapes and self._runtime.needs_equal_shapes):
                raise WorkerMismatchError(
                    f"In step {self._step + 1}, the batches of worker {first} and worker {index} have different "
                    + ("structures or dtypes." if differ else "inner shapes."),
                    received={
                        f"worker_{first}": expected if differ else expected_shapes,
                        f"worker_{index}": structure if differ else shapes,
                    },
                    hint="Return batches of the same structure and dtypes on every worker."
                    if differ
                    else "Pad the batches to the same lengths on every worker.",
                )

    def _checked(self, counts: list[int]) -> list[int]:
        if not self._is_global:
            return counts
        if len(set(counts)) > 1:
            differing = next(i for i, n in enumerate(counts) if n != counts[0])
            raise WorkerMismatchError(
                f"The workers have different datasets: in step {self._step + 1}, the global batch has {counts[0]} rows "
                f"on worker 0 and {counts[differing]} rows on worker {differing}.",
                received={"rows": counts},
                hint="Pass the same global batches on every worker, in the same order. kdist selects the rows of each "
                "worker.",
            )
        return [stop - first for first, stop in even_split(counts[0], self._runtime.num_replicas)]


@atexit.register
def _close_all() -> None:
    """Closes all pipelines while their code can run. A thread that Python ends later can abort JAX."""
    for steps in list(_open):
        steps._on_its_way = None  # the other workers may send theirs only much later
        steps._pipeline.close(_PATIENCE_AT_EXIT)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def open_steps(
    runtime: Runtime, reader: Iterator[WorkerBatch], options: InputOptions, is_global: bool, start: int = 0
) -> Steps:
    """Starts to prefetch a worker's batches and to copy them to the devices. See `Steps`."""
    buffer = options.experimental_per_replica_buffer_size
    reader = _ready(runtime, reader, options.experimental_fetch_to_device is not False, buffer > 0)
    if not buffer:
        return Steps(runtime, Prefetch(reader, 0), is_global, start)
    # One more than the batches that wait on a device, because the thread prepares another one.
    return Steps(runtime, Prefetch(primed(reader), buffer + 1), is_global, start)


def _ready(
    runtime: Runtime, reader: Iterator[WorkerBatch], place: bool, waits: bool
) -> Iterator[WorkerBatch]:
    """Prepares batches for their steps. With prefetching, this runs in the reading thread."""
    for batch in reader:
        if runtime.num_workers > 1:
            batch.kind_digest  # noqa: B018  # cached here, not between two steps
        if batch.parts is not None and place:
            batch.parts, batch.is_placed = runtime.place(batch.parts), True
        elif waits:
            batch.parts, batch.whole = rows.owned(batch.parts), rows.owned(batch.whole)
        yield batch


def split_batch(runtime: Runtime, batch: Structure) -> ReplicaBatches:
    """Returns the batches for a step function from a global batch that every worker has."""
    count = rows.num_rows(batch)
    if runtime.num_replicas == 1:
        return ReplicaBatches(runtime.place_for_step([batch]), [(0, count)])
    split = runtime.split(count)
    if runtime.needs_equal_shapes and rows.has_sparse(batch):
        split = [(0, count)] * runtime.num_replicas
    if have_all_rows(split):
        parts = [batch] * len(runtime.devices)
    else:
        parts = rows.cut(batch, [split[i] for i in runtime.replica_ids])
    return ReplicaBatches(runtime.place_for_step(parts), split)
