"""`Prefetch`: a thread that prepares batches ahead of the step that uses them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdist.backends import threads
from kdist.tracing import span

# How long the thread sleeps on a full queue before it looks whether it is still wanted.
_GLANCE = 0.1


@dataclass
class End:
    """What comes after the last batch: nothing, or the error that ended the pipeline."""

    error: BaseException | None = None


def primed(items: Iterator[Any]) -> Iterator[Any]:
    """Reads the first item at once, in the thread that calls.

    What shuffles draws its seed then, from global generators, and not at some time in another thread. An error
    waits for its turn: all workers learn of it in the first step.
    """
    try:
        return itertools.chain(list(itertools.islice(items, 1)), items)
    except Exception as error:
        return _failing(error)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


class Prefetch:
    """Items of an iterator, read ahead.

    Args:
        items: What to read; read and closed by one thread.
        depth: How many items to hold; 0 reads each one when it is asked for, without a thread.
    """

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._depth = depth
        self._end: End | None = None
        if depth == 0:
            self._items = items
            return
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._closed = threading.Event()
        # The thread holds no reference to this object, whose user may forget to close it.
        self._thread = threads.helper("kdist prefetch", _fill, items, self._queue, self._closed)
        self._thread.start()

    def take(self, most: int, wait: float | None = None) -> list[Any]:
        """Returns the items that are ready; an `End` is the last, and comes again and again.

        Args:
            most: How many items to take.
            wait: Seconds to wait for the first one; `None` for as long as it takes.
        """
        if self._end is not None:
            return [self._end]
        taken: list[Any] = []
        while len(taken) < most and not (taken and isinstance(taken[-1], End)):
            if not self._depth and (taken or wait is not None):
                break  # nothing is ready before it is read
            try:
                taken.append(self._take_one(0.0 if taken else wait))
            except queue.Empty:
                break
        if taken and isinstance(taken[-1], End):
            self._end = taken[-1]
        return taken

    def _take_one(self, wait: float | None) -> Any:
        if not self._depth:
            return _read_one(self._items)
        return self._queue.get(block=wait != 0.0, timeout=wait or None)

    def close(self) -> None:
        """Ends the thread and the pipeline."""
        self._end = End()
        if not self._depth:
            _close(self._items)
            return
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # wakes a thread that waits for room
                self._queue.get_nowait()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._closed.set()


def _read_one(items: Iterator[Any]) -> Any:
    try:
        with span("reading", "input"):
            return next(items)
    except StopIteration:
        return End()
    except BaseException as error:  # a SystemExit ends the pipeline, and the main thread must learn of it
        return End(error)


def _fill(items: Iterator[Any], filled: queue.Queue[Any], closed: threading.Event) -> None:
    item: Any = None
    while not closed.is_set() and not isinstance(item, End):
        item = _read_one(items)
        while not closed.is_set():
            try:
                filled.put(item, timeout=_GLANCE)
                break
            except queue.Full:
                continue
    _close(items)


def _close(items: Any) -> None:
    if hasattr(items, "close"):
        items.close()
