"""One worker's part of a save: writes its shard. The first worker of a directory also commits the checkpoint.

This code must not use collectives. It runs in a background thread, where they could be mixed up with the
training loop's collectives. Workers that write into the same directory communicate through small files in it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kdist import faults, tracing
from kdist.backends import threads
from kdist.checkpoint import layout, storage
from kdist.checkpoint.folders import Folder, clean_store, remove
from kdist.checkpoint.index import DTYPES, File, Index, Piece, Tensor, crc32, dump
from kdist.checkpoint.shards import Span
from kdist.cluster import timeouts
from kdist.control import stalls, whereabouts
from kdist.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


_POLL = 0.01
_LOOK = 0.5
# Writing gets less processor time than steps, but enough that a worker waiting for a save does not look hung.
_NICENESS = 5
# Other workers count as lost after this many heartbeat timeouts without progress in the directory. The limits
# in seconds apply if this process is exiting, normally or because of an error.
_PATIENCE_HEARTBEATS = 4
_PATIENCE_AT_EXIT = 10.0
_PATIENCE_AFTER_ERROR = 2.0


@dataclass
class Share:
    """The data that one worker writes."""

    tensors: Sequence[Tensor]  # All tensors of the checkpoint.
    spans: Sequence[Span]  # The spans of this worker.
    num_shards: int  # The workers of the first ranks write a shard each.
    read: Callable[[], Iterable[np.ndarray]]  # Yields the bytes of each span once.
    facts: Mapping[str, Any]  # Further fields of the index.
    states: Mapping[str, object]  # The states of this worker's objects.

    def offsets(self) -> list[int]:
        """Returns the offset of each span after the header, followed by the end of the last span."""
        sizes = ((span.last - span.first) * self.tensors[span.tensor].size.itemsize for span in self.spans)
        return [0, *itertools.accumulate(sizes)]


def header_of(share: Share) -> bytes:
    """Returns the header of a safetensors file, including its length."""
    entries: dict[str, object] = {"__metadata__": {"format": "kdist.checkpoint"}}
    for span, (begin, end) in zip(share.spans, itertools.pairwise(share.offsets()), strict=True):
        tensor = share.tensors[span.tensor]
        whole = span.last - span.first == tensor.size.elements and not tensor.axis
        along = f"axis {tensor.axis}, " if tensor.axis else ""
        name = tensor.name if whole else f"{tensor.name}[{along}{span.first}:{span.last}]"
        known = DTYPES[tensor.dtype][1]
        shape = list(tensor.shape) if whole and known else [span.last - span.first if known else end - begin]
        entries[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Save:
    """A running save to a directory that its workers have agreed on.

    The first worker of the directory calls `after` when the checkpoint is visible.
    """

    def __init__(self, folder: Folder, after: Callable[[], None] | None = None) -> None:
        self.error: Exception | None = None
        self.folder = folder
        self._after = after
        self._thread: threading.Thread | None = None

    def start(self, share: Share, background: bool = True) -> None:
        """Writes this worker's share, in a separate thread if `background` is true."""
        if not background:
            self._write(share)
            return
        # Python waits for a non-daemon thread before it exits.
        self._thread = threads.helper("kdist checkpoint", self._write_behind, share, daemon=False)
        self._thread.start()

    def join(self) -> str | None:
        """Waits until this worker's part is done, with the commit on the first worker. Returns its error, or `None`."""
        if self._thread is not None:
            waiting = stalls.waiting_for_thread(lambda: self.folder.is_waiting)
            with tracing.span("waiting for a save", "save"), waiting:
                self._thread.join()
        if self.error is None:
            return None
        kind = "" if isinstance(self.error, CheckpointError) else f"{type(self.error).__name__}: "
        return f"saving {self.folder.final} failed: {kind}{self.error}"

    def _write_behind(self, share: Share) -> None:
        if sys.platform == "linux":  # only Linux supports a priority per thread
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        self._write(share)

    def _write(self, share: Share) -> None:
        folder = self.folder
        try:
            with tracing.span("writing a shard", "save"):
                write_shard(folder, share)
            if folder.rank == 0:
                with tracing.span("committing a checkpoint", "save"):
                    commit(folder, share)
                if self._after is not None:
                    self._after()
            folder.release()
        except Exception as error:
            self.error = error
            abandon(folder, error)


def write_shard(folder: Folder, share: Share) -> None:
    """Writes this worker's shard, if it has one, and reports it to the first worker."""
    faults.point("save-write")
    said = {"states": dict(share.states)}
    if folder.rank < share.num_shards:
        said |= _write_spans(folder, share)
    report = os.path.join(folder.temporary, layout.report(folder.rank, folder.tag))
    part = report if folder.tag else f"{report}.part"  # an object appears when it is complete
    write_file(part, [json.dumps(said).encode()])
    faults.point("save-report")
    if part != report:
        os.rename(part, report)


def _write_spans(folder: Folder, share: Share) -> dict[str, Any]:
    """Writes this worker's shard, waits until it is on disk, and returns its entries for the index."""
    name = layout.shard(folder.rank, share.num_shards, folder.tag)
    header = header_of(share)
    offsets = share.offsets()
    checksums: list[Callable[[], int]] = []

    def parts() -> Iterator[bytes | np.ndarray]:
        yield header
        for part, (begin, end) in zip(share.read(), itertools.pairwise(offsets), strict=True):
            if len(part) != end - begin:
                raise ValueError(f"a span has {len(part)} bytes instead of {end - begin}")
            if pool is not None:
                checksums.append(pool.submit(crc32, part).result)
            else:
                checksums.append(functools.partial(int, crc32(part)))
            for start in range(0, len(part), storage.CHUNK):
                yield part[start : start + storage.CHUNK]

    # In a synchronous save, compute checksums in parallel with writing, because the main thread waits.
    beside = threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) if beside else contextlib.nullcontext() as pool:
        write_file(os.path.join(folder.temporary, name), parts())
        found = [checksum() for checksum in checksums]
    pieces = [
        [span.tensor, asdict(Piece(folder.rank, span.first, span.last, len(header) + begin, crc))]
        for span, begin, crc in zip(share.spans, offsets, found, strict=False)
    ]
    file = File(name, len(header) + offsets[-1], len(header), crc32(header))
    return {"file": asdict(file), "pieces": pieces}


def write_file(path: str, parts: Iterable[Any]) -> None:
    """Writes a file and waits until it is on disk."""
    storage.of(path).write(path, parts)


def sync_folder(path: str) -> None:
    """Waits until the entries of a directory are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support it
            os.fsync(fd)
    finally:
        os.close(fd)


def commit(folder: Folder, share: Share) -> None:
    """Waits for all shards in a directory, writes the index and makes the checkpoint visible."""
    folder.is_waiting = True
    reports = [wait_for(folder, rank) for rank in range(len(folder.members))]
    folder.is_waiting = False
    faults.point("save-commit")
    index = merge(folder, share, reports)
    if folder.tag:
        put_index(folder, dump(index))
        return
    for rank in range(len(folder.members)):
        os.unlink(os.path.join(folder.temporary, layout.report(rank)))
    write_file(os.path.join(folder.temporary, layout.INDEX), [dump(index)])
    sync_folder(folder.temporary)
    faults.point("save-publish")
    publish(folder)


def publish(folder: Folder) -> None:
    """Renames a complete directory to its final name."""
    parent, name = os.path.split(folder.final)
    aside = None
    if os.path.lexists(folder.final):
        _check_replaceable(folder)
        # A directory cannot be renamed over another one. In between, `layout.find` returns the old directory.
        aside = os.path.join(parent, layout.replaced(name, folder.token))
        os.rename(folder.final, aside)
    try:
        os.rename(folder.temporary, folder.final)
    except OSError as error:
        # Renaming over a directory with files fails, so the check above needs no lock.
        if os.path.lexists(folder.final):
            raise _taken(folder) from error
        raise
    sync_folder(parent)
    whereabouts.last_saved = folder.final
    if aside is not None:
        remove(aside)


def put_index(folder: Folder, index: bytes) -> None:
    """Completes a checkpoint in an object store, and then removes the files of the checkpoint that it replaces."""
    store = storage.of(folder.final)
    path = os.path.join(folder.final, layout.INDEX)
    old = b""
    with contextlib.suppress(FileNotFoundError):
        old = store.read(path)
        _check_replaceable(folder)
    faults.point("save-publish")
    folder.is_committed = True  # even if the next line fails, the store may have got the index
    store.put(path, index)
    whereabouts.last_saved = folder.final
    with contextlib.suppress(OSError, CheckpointError):  # remaining files are harmless
        kept, replaced = layout.shards_in(index), layout.shards_in(old)
        remove(folder.final, lambda name: name not in kept and (name in replaced or folder.tag in name))
        clean_store(folder.final, kept)


def _check_replaceable(folder: Folder) -> None:
    if not layout.is_checkpoint(folder.final):
        raise CheckpointError(
            "Cannot save the checkpoint: its path exists and is not a checkpoint.",
            received={"path": folder.final},
            hint="Choose another path, or move the existing file or directory.",
        )
    if folder.number is not None:
        raise _taken(folder)


def _taken(folder: Folder) -> CheckpointError:
    return CheckpointError(
        "Cannot save the checkpoint: another job has just saved a checkpoint of the same name.",
        received={"path": folder.final},
        hint="Use a separate directory for each job.",
    )


def merge(folder: Folder, share: Share, reports: Sequence[Mapping[str, Any]]) -> Index:
    """Returns the index of a checkpoint, merged from the reports of all workers."""
    pieces: list[list[Piece]] = [[] for _ in share.tensors]
    for report in reports[: share.num_shards]:
        for number, piece in report["pieces"]:
            pieces[number].append(Piece(**piece))
    tensors = [
        replace(tensor, pieces=tuple(sorted(found, key=lambda piece: piece.first)))
        for tensor, found in zip(share.tensors, pieces, strict=True)
    ]
    states = {}
    for name in reports[0]["states"]:
        everyone = [report["states"].get(name) for report in reports]
        states[name] = everyone[:1] if all(state == everyone[0] for state in everyone) else everyone
    # The clocks of machines differ and may be set back. Make sure that `saved_at` increases with every save.
    others = layout.find(storage.split(folder.final)[0])
    saved_at = max([time.time(), *(other.saved_at + 1e-3 for other in others)])
    return Index(
        saved_at=round(saved_at, 6),
        workers=list(folder.members),
        tensors=tensors,
        files=[File(**report["file"]) for report in reports[: share.num_shards]],
        states=states,
        **share.facts,
    )


def wait_for(folder: Folder, rank: int) -> Mapping[str, Any]:
    """Waits for and returns the report of one worker of the directory.

    Raises:
        CheckpointError: If a worker fails, the worker is lost, or the directory stays unchanged for too long.
    """
    store = storage.of(folder.temporary)
    report = layout.report(rank, folder.tag)
    failures = {layout.failure(i, folder.tag): other for i, other in enumerate(folder.members)}
    worker = folder.members[rank]
    seen: list[tuple[str, int]] | None = None
    looked = -math.inf
    while True:
        now = time.monotonic()
        if folder.tag or now - looked >= _LOOK:
            looked = now
            is_lost = worker in folder.lost()
            sizes = sorted(store.sizes(folder.temporary))
            if sizes != seen:
                seen, since = sizes, now
        is_over = is_lost or now - since > _patience()  # before reading: an existing report counts
        names = [report, *failures]
        for name in filter(dict(sizes).__contains__, names) if folder.tag else names:  # saves requests
            with contextlib.suppress(FileNotFoundError):
                text = store.read(os.path.join(folder.temporary, name)).decode()
                if name == report:
                    return json.loads(text)
                raise CheckpointError(
                    f"Worker {failures[name]} could not write its shard: {text or 'its log shows the reason.'}",
                    received={"checkpoint": folder.final},
                    hint=f"Fix the cause on worker {failures[name]}, then save again.",
                )
        if is_over:
            raise CheckpointError(
                f"Worker {worker} did not write its shard.",
                received={"checkpoint": folder.final, "seconds": round(now - since, 1)},
                hint=f"Read the log of worker {worker}. It failed or hangs.",
            )
        time.sleep(_LOOK if folder.tag else _POLL)


def _patience() -> float:
    """Returns for how many seconds the directory may stay unchanged."""
    seconds = _PATIENCE_HEARTBEATS * timeouts.heartbeat_timeout()
    if threading.main_thread().is_alive():
        return seconds
    failed = getattr(sys, "last_type", None) is not None
    return min(seconds, _PATIENCE_AFTER_ERROR if failed else _PATIENCE_AT_EXIT)


def abandon(folder: Folder, error: BaseException) -> None:
    """Reports a failure to the first worker, which removes the directory. Ignores errors of the disk."""
    text = f"{type(error).__name__}: {error}".encode()[:2000]
    path = os.path.join(folder.temporary, layout.failure(folder.rank, folder.tag))
    if folder.rank == 0:
        if not folder.is_committed:
            remove(folder.temporary, lambda name: folder.tag in name)
        folder.release()
        return
    if folder.tag:
        with contextlib.suppress(Exception):  # the error of the failed write is the one to report
            storage.of(path).put(path, text)
        return
    with contextlib.suppress(OSError):
        # Rename the file when it is complete, because the first worker reads it as soon as it exists.
        with open(f"{path}.part", "wb", buffering=0) as file:
            with contextlib.suppress(OSError):  # on a full disk, an empty file may still be possible
                os.write(file.fileno(), text)
        os.rename(f"{path}.part", path)
    folder.release()
