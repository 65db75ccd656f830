"""`Prefetch`, which prepares batches in a thread before the steps that use them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist.backends import threads
from kdist.tracing import span

if TYPE_CHECKING:
    from kdist.arrays.types import T

# Seconds that the thread waits on a full queue before it checks whether the pipeline was closed.
_GLANCE = 0.1
_NAME = "kdist prefetch"


@dataclass
class End:
    """Marks the end of the pipeline, with the error if one ended it."""

    error: BaseException | None = None


def is_reading() -> bool:
    """Returns whether a thread reads in advance, and may draw random numbers at any time."""
    return any(thread.name == _NAME for thread in threading.enumerate())


def primed(items: Iterator[T]) -> Iterator[T]:
    """Reads the first item immediately, in the calling thread.

    A pipeline that shuffles then draws its seed from the global generators now, not later in another thread.
    An error is raised only when the item is used, so that all workers receive it in the first step.
    """
    try:
        return itertools.chain(list(itertools.islice(items, 1)), items)
    except Exception as error:
        return _failing(error)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


class Prefetch:
    """Reads items of an iterator in advance.

    Args:
        items: The iterator. Only one thread reads and closes it.
        depth: The maximum number of waiting items. With 0, `take` reads the items itself, without a thread.
    """

    def __init__(self, items: Iterator[object], depth: int) -> None:
        self._depth = depth
        self._end: End | None = None
        self._is_closed = False
        if depth == 0:
            self._items = items
            return
        self._queue: queue.Queue[object] = queue.Queue(depth)
        self._closed = threading.Event()
        # The thread has no reference to this object, so the object is deleted even if it is never closed.
        self._thread = threads.helper(_NAME, _fill, items, self._queue, self._closed)
        self._thread.start()

    def take(self, most: int, wait: float | None = None) -> list[Any]:
        """Returns the items that are ready. The last item is an `End`, which all later calls also return.

        Args:
            most: The maximum number of items.
            wait: The seconds to wait for the first item, or `None` to wait without a limit.
        """
        if self._end is not None:
            return [self._end]
        taken: list[Any] = []
        while len(taken) < most and not (taken and isinstance(taken[-1], End)):
            if not self._depth and (taken or wait is not None):
                break  # without a thread, no item is ready in advance
            try:
                taken.append(self._take_one(0.0 if taken else wait))
            except queue.Empty:
                break
        if taken and isinstance(taken[-1], End):
            self._end = taken[-1]
        return taken

    def _take_one(self, wait: float | None) -> object:
        if not self._depth:
            return _read_one(self._items)
        return self._queue.get(block=wait != 0.0, timeout=wait or None)

    def close(self, patience: float = 10.0) -> None:
        """Stops the thread and closes the pipeline. Waits up to `patience` seconds for a read that has begun."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end = End()
        if not self._depth:
            _close(self._items)
            return
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # wakes the thread if the queue is full
                self._queue.get_nowait()
        if self._thread is not threading.current_thread():
            self._thread.join(patience)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._closed.set()


def _read_one(items: Iterator[T]) -> T | End:
    try:
        with span("reading", "input"):
            return next(items)
    except StopIteration:
        return End()
    except BaseException as error:  # also SystemExit, which the main thread must receive
        return End(error)


def _fill(items: Iterator[object], filled: queue.Queue[object], closed: threading.Event) -> None:
    item: object = None
    while not closed.is_set() and not isinstance(item, End):
        item = _read_one(items)
        while not closed.is_set():
            try:
                filled.put(item, timeout=_GLANCE)
                break
            except queue.Full:
                continue
    _close(items)


def _close(items: object) -> None:
    if hasattr(items, "close"):
        items.close()
