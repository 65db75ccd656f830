"""Threads that answer calls, and do not keep their process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonThreads(Executor):
    """As many threads as there are calls at once, of which none is waited for as the process ends.

    Those of a `ThreadPoolExecutor` are: a coordinator with servers of its own, in one process, would never end.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a function in one of the threads."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call
            self._idle.release()
