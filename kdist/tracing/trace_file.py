"""`KDIST_TRACE=directory`: each worker writes a trace, which you can open in Perfetto and chrome://tracing.

The format is Chrome's "Trace Event Format": an array with one event per line. The closing bracket may be
missing, so you can also open the file of a killed worker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import warnings
from typing import Any

from kdist.cluster import environment, roles
from kdist.tracing import merging, spans
from kdist.tracing.spans import Span

VARIABLE = "KDIST_TRACE"
# Limits for the age and the number of buffered lines, which are lost when a worker is killed.
_SECONDS = 0.2
_MOST_LINES = 512
# About 150 MB. Viewers can hardly show longer traces.
_MOST_EVENTS = 1_000_000
# Offsets of process numbers, which determine the rows: between starts of the same task, and between jobs.
_STARTS, _JOBS = 10_000, 100_000_000


class TraceFile:
    """The trace of this process, in a directory that is created if necessary."""

    def __init__(self, folder: str, index: int, job: str = "worker") -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self.leads = index == 0 and job in ("worker", "chief")
        self._file, start = _create(folder, job, index)
        rank = _JOBS * merging.JOBS.index(job) + index
        self._process = rank + _STARTS * start
        # Monotonic clocks of different processes have different origins.
        self._zero = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.RLock()
        self._threads = [threading.main_thread()]  # one row per thread
        self._is_empty = True
        self._lines: list[str] = []
        self._written = time.monotonic()
        self._number = 0
        again = f", start {start + 1}" if start else ""
        name = f"{roles.task_name(job, index)}{again} ({socket.gethostname()}, process {os.getpid()})"
        self._describe("process_name", name=name)
        self._describe("process_sort_index", sort_index=rank)
        self._describe("thread_name", name="main")
        self.flush()

    def add(self, span: Span) -> None:
        """Adds a span that has just ended."""
        event: dict[str, Any] = {
            "name": span.name,
            "cat": span.category,
            "ph": "X",
            "ts": (self._zero + span.begin) / 1000,
            "dur": (span.end - span.begin) / 1000,
            "pid": self._process,
        }
        if span.about:
            event["args"] = span.about
        with self._lock:
            if self._file < 0:  # closed while this span ended, in another thread
                return
            event["tid"] = self._row()
            self._append(event)
            self._number += 1
            if self._number >= _MOST_EVENTS:
                self._append(
                    event | {"name": "Trace limit reached: later events are missing.", "ph": "i", "args": {}}
                )
                self.close()
            elif len(self._lines) >= _MOST_LINES or time.monotonic() - self._written > _SECONDS:
                self.flush()

    def flush(self) -> None:
        """Writes the buffered events."""
        with self._lock:
            data, self._lines = "".join(self._lines).encode(), []
            self._written = time.monotonic()
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # for example a full disk, which must not stop training
                spans.remove_sink(self)
                warnings.warn(
                    f"{VARIABLE}: stopped writing the trace to {self.folder}: {error}. "
                    "Choose a directory with free space."
                )

    def close(self) -> None:
        """Writes the buffered events and the end of the trace, and closes the file."""
        with self._lock:
            if self._file < 0:
                return
            spans.remove_sink(self)
            self._lines.append("\n]\n")
            self.flush()
            os.close(self._file)
            self._file = -1

    def _row(self) -> int:
        """Returns the row of this thread. New threads reuse rows of finished threads with the same name."""
        mine = threading.current_thread()
        for number, thread in enumerate(self._threads):
            if thread is mine or (thread.name == mine.name and not thread.is_alive()):
                self._threads[number] = mine
                return number
        number = len(self._threads)
        self._threads.append(mine)
        self._describe("thread_name", number, name=mine.name)
        self._describe("thread_sort_index", number, sort_index=number)
        return number

    def _describe(self, what: str, thread: int = 0, **args: Any) -> None:
        self._append({"name": what, "ph": "M", "pid": self._process, "tid": thread, "args": args})

    def _append(self, event: dict[str, Any]) -> None:
        self._lines.append(merging.line_of(event, self._is_empty))
        self._is_empty = False


def _create(folder: str, job: str, index: int) -> tuple[int, int]:
    """Creates a new file, and returns its descriptor and the start number in its name."""
    start = 0
    while True:
        path = os.path.join(folder, merging.file_of(job, index, start))
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666), start
        start += 1


_file: TraceFile | None = None


def begin(worker: int) -> None:
    """Begins the trace of this process, if `KDIST_TRACE` is set and the trace has not begun.

    With parameter servers, and for evaluators, the file is named after the task in `TF_CONFIG`.
    """
    global _file
    folder = environment.get(VARIABLE)
    if not folder or _file is not None:
        return
    try:
        job, index = roles.own_role() or ("worker", worker)
        _file = TraceFile(folder, index, job)
    except OSError as error:
        warnings.warn(f"{VARIABLE}: cannot write the trace to {folder}: {error}. Choose another directory.")
        return
    spans.add_sink(_file)
    atexit.register(_end)


def flush() -> None:
    """Writes the buffered events, so that merged traces include them."""
    if _file is not None:
        _file.flush()


def _end() -> None:
    if _file is None:
        return
    _file.close()
    if _file.leads:
        with contextlib.suppress(OSError):
            merging.merge(_file.folder)


def _in_child() -> None:
    global _file
    _file = None


if hasattr(os, "register_at_fork"):  # only the parent must write its buffered events
    os.register_at_fork(after_in_child=_in_child)
