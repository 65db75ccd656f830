"""`Prefetch`: a thread that prepares batches ahead of the step that uses them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# How long the thread sleeps on a full queue before it looks whether it is still wanted.
_GLANCE = 0.1


@dataclass
class End:
    """What comes after the last batch: nothing, or the error that ended the pipeline."""

    error: BaseException | None = None


class Prefetch:
    """Items of an iterator, read ahead.

    Args:
        items: What to read; read and closed by one thread.
        depth: How many items to hold; 0 reads each one when it is asked for, without a thread.
    """

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._depth = depth
        self._end: End | None = None
        self._next: Callable[[], Any]
        if depth == 0:
            self._items = items
            return
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._closed = threading.Event()
        # The thread holds no reference to this object, whose user may forget to close it.
        self._thread = threading.Thread(
            target=_fill, args=(items, self._queue, self._closed), name="kdist prefetch", daemon=True
        )
        self._thread.start()

    def take(self) -> list[Any]:
        """Returns all items that are ready, at least one; an `End` is the last, and comes again and again."""
        if self._end is not None:
            return [self._end]
        taken = [self._take_one(True)]
        while self._depth and not isinstance(taken[-1], End):
            try:
                taken.append(self._take_one(False))
            except queue.Empty:
                break
        if isinstance(taken[-1], End):
            self._end = taken[-1]
        return taken

    def _take_one(self, wait: bool) -> Any:
        return self._queue.get(block=wait) if self._depth else _read_one(self._items)

    def close(self) -> None:
        """Ends the thread and the pipeline."""
        self._end = End()
        if not self._depth:
            _close(self._items)
            return
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._closed.set()


def _read_one(items: Iterator[Any]) -> Any:
    try:
        return next(items)
    except StopIteration:
        return End()
    except Exception as error:
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
