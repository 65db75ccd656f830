"""One worker's part of a save: its shard, and for the first worker of a folder the commit. No collectives here.

All of it runs in a background thread, where a collective could meet one of the training loop's. Workers that
write into the same folder hear of each other by small files in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kdist import faults
from kdist.backends import stalls
from kdist.checkpoint import layout
from kdist.checkpoint.checksums import crc32
from kdist.checkpoint.index import DTYPES, File, Index, Piece, Tensor, dump
from kdist.checkpoint.places import Place
from kdist.checkpoint.shards import Span
from kdist.cluster import liveness
from kdist.errors import CheckpointError

_CHUNK = 32 << 20
_POLL = 0.01
_LOOK = 0.5
# How much less of a busy processor than a step; not so little that whoever waits for a save is taken for hung.
_NICENESS = 5
# After so many heartbeat timeouts without any progress in the folder, the others count as gone; after so many
# seconds, where this process only waits for them to end, or ends because of an error.
_PATIENCE_HEARTBEATS = 4
_PATIENCE_AT_EXIT = 10.0
_PATIENCE_AFTER_ERROR = 2.0


@dataclass
class Share:
    """What one worker writes.

    Args:
        tensors: All tensors of the checkpoint.
        spans: Those of this worker.
        read: Gives the bytes of each of them, once.
        facts: What the index says, beside where the pieces are.
        states: The states of this worker's objects.
    """

    tensors: Sequence[Tensor]
    spans: Sequence[Span]
    read: Callable[[], Iterable[Any]]
    facts: Mapping[str, Any]
    states: Mapping[str, Any]

    def offsets(self) -> list[int]:
        """Where each span begins after the header, and where the last one ends."""
        ends = [0]
        for span in self.spans:
            ends.append(ends[-1] + (span.last - span.first) * self.tensors[span.tensor].size.itemsize)
        return ends


def header_of(share: Share) -> bytes:
    """Returns what comes before the tensors in a safetensors file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "kdist.checkpoint"}}
    offsets = share.offsets()
    for span, begin, end in zip(share.spans, offsets, offsets[1:], strict=False):
        tensor = share.tensors[span.tensor]
        whole = span.last - span.first == tensor.size.elements
        name = tensor.name if whole else f"{tensor.name}[{span.first}:{span.last}]"
        known = DTYPES[tensor.dtype][1]
        shape = list(tensor.shape) if whole and known else [span.last - span.first if known else end - begin]
        entries[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Save:
    """A save under way. Starts at once; `join` waits for this worker's part of it.

    Args:
        place: Where it goes.
        share: What this worker writes.
        after: Called once the checkpoint is visible, by the first worker of the folder.
        background: Whether to write in a thread of its own; else all is done on return.
    """

    def __init__(
        self, place: Place, share: Share, after: Callable[[], None] | None = None, background: bool = True
    ) -> None:
        self.path = place.final
        self.error: Exception | None = None
        self._place = place
        self._after = after
        self._writing: threading.Thread | None = None
        if not background:
            self._write(share)
            return
        # No daemon: Python waits for it before it ends.
        self._writing = threading.Thread(
            target=self._write_behind, args=(share,), name="kdist checkpoint", daemon=False
        )
        self._writing.start()

    def join(self) -> None:
        """Waits until this worker's part is done; for the first worker of a folder, until it is visible."""
        if self._writing is not None:
            with stalls.waiting_for_thread(lambda: self._place.is_waiting):
                self._writing.join()

    @property
    def is_done(self) -> bool:
        """Whether this worker's part is done."""
        return self._writing is None or not self._writing.is_alive()

    def _write_behind(self, share: Share) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: steps go first
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        self._write(share)

    def _write(self, share: Share) -> None:
        place = self._place
        try:
            write_shard(place, share)
            if place.rank == 0:
                commit(place, share)
                if self._after is not None:
                    self._after()
            place.release()
        except Exception as error:
            self.error = error
            abandon(place, error)


class _Checksums:
    """Computes checksums: beside the writing where the main thread waits for it, else in the same thread.

    Args:
        beside: Whether to take another thread.
    """

    def __init__(self, beside: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if beside else None

    def __enter__(self) -> _Checksums:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def add(self, part: Any) -> Callable[[], int]:
        """Returns what gives the checksum of bytes, later."""
        if self._pool is not None:
            return self._pool.submit(crc32, part).result
        checksum = crc32(part)
        return lambda: checksum


def write_shard(place: Place, share: Share) -> None:
    """Writes a worker's shard, waits until it is on disk, and reports it to the first worker of the folder."""
    name = layout.shard(place.rank, len(place.members))
    header = header_of(share)
    offsets = share.offsets()
    checksums: list[Callable[[], int]] = []

    def parts() -> Iterator[Any]:
        yield header
        for part in share.read():
            checksums.append(sums.add(part))
            for start in range(0, len(part), _CHUNK):
                yield part[start : start + _CHUNK]

    faults.point("save-write")
    with _Checksums(beside=threading.current_thread() is threading.main_thread()) as sums:
        write_file(os.path.join(place.temporary, name), parts())
        found = [checksum() for checksum in checksums]
    pieces = [
        [span.tensor, asdict(Piece(place.rank, span.first, span.last, len(header) + begin, crc))]
        for span, begin, crc in zip(share.spans, offsets, found, strict=False)
    ]
    file = File(name, len(header) + offsets[-1], len(header), crc32(header))
    said = {"file": asdict(file), "pieces": pieces, "states": dict(share.states)}
    report = os.path.join(place.temporary, layout.report(place.rank))
    write_file(report + ".part", [json.dumps(said).encode()])
    faults.point("save-report")
    os.rename(report + ".part", report)


def write_file(path: str, parts: Iterable[Any]) -> None:
    """Writes a file and waits until it is on disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        done = 0
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.write(fd, view)
                if written >= _CHUNK and hasattr(os, "posix_fadvise"):
                    # Linux begins to write to the disk at once, while the next bytes are made ready.
                    os.posix_fadvise(fd, done, written, os.POSIX_FADV_DONTNEED)
                view = view[written:]
                done += written
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: str) -> None:
    """Waits until the names in a folder are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems of a network cannot
            os.fsync(fd)
    finally:
        os.close(fd)


def commit(place: Place, share: Share) -> None:
    """Waits for all shards of a folder, writes the index and makes the checkpoint visible."""
    place.is_waiting = True
    reports = [wait_for(place, rank) for rank in range(len(place.members))]
    place.is_waiting = False
    faults.point("save-commit")
    index = merge(place, share, reports)
    for rank in range(len(place.members)):
        os.unlink(os.path.join(place.temporary, layout.report(rank)))
    write_file(os.path.join(place.temporary, layout.INDEX), [dump(index)])
    sync_folder(place.temporary)
    faults.point("save-publish")
    publish(place)


def publish(place: Place) -> None:
    """Gives a complete folder its name, in one rename."""
    parent, name = os.path.split(place.final)
    aside = None
    if os.path.lexists(place.final):
        # A folder cannot be renamed over another one. Until this one has its name, `layout.find` takes the other.
        aside = os.path.join(parent, layout.replaced(name, place.token))
        os.rename(place.final, aside)
    os.rename(place.temporary, place.final)
    sync_folder(parent)
    if aside is not None:
        remove(aside)


def merge(place: Place, share: Share, reports: Sequence[Mapping[str, Any]]) -> Index:
    """Returns the index of a checkpoint whose shards all workers have reported."""
    pieces: list[list[Piece]] = [[] for _ in share.tensors]
    for report in reports:
        for number, piece in report["pieces"]:
            pieces[number].append(Piece(**piece))
    tensors = [
        Tensor(tensor.name, tensor.dtype, tensor.shape, tuple(found))
        for tensor, found in zip(share.tensors, pieces, strict=True)
    ]
    states = {}
    for name in reports[0]["states"]:
        everyone = [report["states"].get(name) for report in reports]
        states[name] = everyone[:1] if all(state == everyone[0] for state in everyone) else everyone
    # Clocks of machines differ, and may be set back; what was saved later must say so.
    others = layout.find(os.path.dirname(place.final))
    saved_at = max([time.time(), *(other.saved_at + 1e-3 for other in others)])
    return Index(
        saved_at=round(saved_at, 6),
        workers=list(place.members),
        tensors=tensors,
        files=[File(**report["file"]) for report in reports],
        states=states,
        **share.facts,
    )


def wait_for(place: Place, rank: int) -> Any:
    """Waits for the report of one worker of the folder.

    Raises:
        CheckpointError: It could not write its shard, or nothing happens any more.
    """
    path = os.path.join(place.temporary, layout.report(rank))
    patience = _Patience(place, place.members[rank])
    while True:
        is_over = patience.is_over()  # before the look into the folder: what is there counts
        with contextlib.suppress(FileNotFoundError):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        for other in range(len(place.members)):
            with contextlib.suppress(FileNotFoundError):
                with open(os.path.join(place.temporary, layout.failure(other)), encoding="utf-8") as file:
                    raise CheckpointError(
                        f"Every worker must write its shard, but worker {place.members[other]} could not: "
                        f"{file.read() or 'see its own message'}",
                        received={"checkpoint": place.final},
                    )
        if is_over:
            raise CheckpointError(
                f"Every worker must write its shard, but that of worker {place.members[rank]} did not come.",
                received={"checkpoint": place.final, "seconds": round(patience.waited, 1)},
                hint="Look at that worker's output: has it ended?",
            )
        time.sleep(_POLL)


class _Patience:
    """Says when a worker's report will not come: it is lost, or nothing has changed in the folder for too long."""

    def __init__(self, place: Place, worker: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._worker = worker
        self._clock = clock
        self._seen: Any = None
        self._since = self._looked = clock()
        self._is_lost = False
        self.waited = 0.0
        self._limit = _PATIENCE_HEARTBEATS * liveness.heartbeat_timeout()

    def is_over(self) -> bool:
        now = self._clock()
        if now - self._looked >= _LOOK or self._seen is None:
            self._looked = now
            self._is_lost = self._worker in self._place.lost()
            seen = sorted(_sizes(self._place.temporary))
            if seen != self._seen:
                self._seen, self._since = seen, now
        if not threading.main_thread().is_alive():
            failed = getattr(sys, "last_type", None) is not None
            self._limit = min(self._limit, _PATIENCE_AFTER_ERROR if failed else _PATIENCE_AT_EXIT)
        self.waited = now - self._since
        return self._is_lost or self.waited > self._limit


def _sizes(folder: str) -> Iterator[tuple[str, int]]:
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # moved to its place meanwhile
            yield entry.name, entry.stat().st_size


def abandon(place: Place, error: BaseException) -> None:
    """Lets the first worker of the folder know, as far as the disk still takes it; that one removes the folder."""
    if place.rank == 0:
        remove(place.temporary)
        place.release()
        return
    path = os.path.join(place.temporary, layout.failure(place.rank))
    with contextlib.suppress(OSError):
        # Under another name until it says why: who finds it reads it at once.
        fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):  # a full disk takes a name
                os.write(fd, f"{type(error).__name__}: {error}".encode()[:2000])
        finally:
            os.close(fd)
        os.rename(f"{path}.part", path)
    place.release()


def remove(folder: str) -> None:
    """Deletes a folder; what cannot be deleted is left for the next save."""
    shutil.rmtree(folder, ignore_errors=True)
