"""Threads for replicas, of which one runs at a time.

A replica thread passes the baton to the next one at every collective, as in `tf.distribute`. Keras's Python
objects need no locks because only one replica runs at any time. The fixed order makes results reproducible.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kdist.errors import WorkerMismatchError

if TYPE_CHECKING:
    from contextvars import Context

    from kdist.arrays.types import R, T

    # What a thread shall call: in a context, and with a future for the result.
    _Task = tuple[Context, Callable[..., None], tuple[object, ...]]

_END = ("the end of the step", None)

captures: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
"""Captures the backend's state of this thread, such as the current GPU, to enter it in another thread."""


def helper(name: str, function: Callable[..., None], *args: object, daemon: bool = True) -> threading.Thread:
    """Returns a thread, not started yet, that runs with the backend's state of the calling thread."""
    state = captures()

    def call() -> None:
        with state:
            function(*args)

    return threading.Thread(target=call, name=name, daemon=daemon)


class _Stopped(BaseException):
    """Terminates a replica because another one has failed."""


class Baton:
    """Controls which replica of one step runs. Error messages contain the names of the replicas."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._turns = [threading.Lock() for _ in names]
        for turn in self._turns:
            turn.acquire()
        self._holder = 0
        self._brought: list[Any] = [None] * len(names)
        self._result: Any = None
        self._running = [True] * len(names)
        self.error: BaseException | None = None

    def begin(self, index: int) -> None:
        """Waits for the first turn of a replica. The first replica starts immediately."""
        if index > 0:
            self._wait(index)

    def meet(self, index: int, what: tuple[str, object], value: T, combine: Callable[[list[T]], R]) -> R:
        """Waits until all replicas have passed a value, combines the values once, and returns the result.

        Raises:
            WorkerMismatchError: If the replicas called different collectives.
        """
        if self.error is not None:
            raise _Stopped
        self._brought[index] = (what, value)
        last = index == len(self._turns) - 1
        if last:
            self._check_same()
            values = [value for _, value in self._brought]
            self._brought = [None] * len(values)  # releases the values before the next collective
            self._result = combine(values)
        self._hand_to(0 if last else index + 1)
        self._wait(index)
        return self._result

    def end(self, index: int, error: BaseException | None) -> None:
        """Ends a replica, with or without an error, and passes the baton. All replicas must end together."""
        if error is None:
            try:
                self.meet(index, _END, None, lambda _: None)
            except BaseException as met:
                error = met
        if error is not None and not isinstance(error, _Stopped) and self.error is None:
            error.add_note(f"Raised in {self._names[index]}.")
            self.error = error
        self._running[index] = False
        following = [*range(index + 1, len(self._turns)), *range(index)]
        for other in following:
            if self._running[other]:
                self._hand_to(other)
                break

    def _hand_to(self, index: int) -> None:
        self._holder = index
        self._turns[index].release()

    def _wait(self, index: int) -> None:
        try:
            self._turns[index].acquire()
        except BaseException as interrupt:  # Ctrl-C interrupts the first replica, even without the baton
            self.error = self.error or interrupt
            # The interrupt may have arrived just before or just after the baton.
            while self._holder != index:
                self._turns[index].acquire(timeout=0.05)
        if self.error is not None:
            raise _Stopped

    def _check_same(self) -> None:
        first, _ = self._brought[0]
        for name, (what, _) in zip(self._names, self._brought, strict=True):
            if what != first:
                raise WorkerMismatchError(
                    "The replicas called different collectives: "
                    f"{self._names[0]} reached {_describe(first)} and {name} reached {_describe(what)}.",
                    hint="Remove branches that depend on the replica or on its rows from the training step.",
                )


def _describe(what: tuple[str, object]) -> str:
    kind, details = what
    return kind if details is None else f"the {kind} of {details}"


class ReplicaThreads:
    """Runs a function once per replica: the first in the calling thread, the others in separate threads.

    The threads live as long as this object or the program, because PyTorch creates a new thread pool for each
    new thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._tasks: list[queue.SimpleQueue[_Task | None]] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._tasks)

    def run(self, function: Callable[[int, Baton], T]) -> list[T]:
        """Calls `function(index, baton)` for each replica, one at a time, and returns the results.

        If calls fail, raises the first error after all calls have ended. Several threads of the user take turns.
        """
        if len(self._names) == 1:
            return [function(0, Baton(self._names))]
        with self._lock:
            return self._run(function)

    def _run(self, function: Callable[[int, Baton], T]) -> list[T]:
        baton = Baton(self._names)
        self._start()
        results: list[Any] = [None] * len(self._names)
        finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        for index, tasks in enumerate(self._tasks, start=1):
            tasks.put((contextvars.copy_context(), _run_one, (function, index, baton, results, finished)))
        _run_one(function, 0, baton, results, finished)
        for _ in self._names:
            finished.get()
        if baton.error is not None:
            raise baton.error
        return results

    def _start(self) -> None:
        while len(self._tasks) < len(self._names) - 1:
            tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
            name = f"kdist {self._names[len(self._tasks) + 1]}"
            threading.Thread(target=_work, args=(tasks,), name=name, daemon=True).start()
            self._tasks.append(tasks)


def _run_one(
    function: Callable[[int, Baton], object],
    index: int,
    baton: Baton,
    results: list[object],
    finished: queue.SimpleQueue[None],
) -> None:
    error: BaseException | None = None
    try:
        baton.begin(index)
        results[index] = function(index, baton)
    except BaseException as raised:
        error = raised
    baton.end(index, error)
    finished.put(None)


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        context, function, arguments = task
        context.run(function, *arguments)
        del task, context, function, arguments  # otherwise, an idle thread would keep the last model alive


def _close(tasks: list[queue.SimpleQueue[_Task | None]]) -> None:
    for task in tasks:
        task.put(None)
