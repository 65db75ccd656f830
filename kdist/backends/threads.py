"""Replica threads: one at a time runs, and hands the baton to the next at every collective; and a thread for errands.

This is how `tf.distribute` runs its replicas too. Keras keeps much in plain Python objects; since only one
replica runs at any moment, and always in the same order, it is safe, and results are the same every time.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from kdist.errors import WorkerMismatchError

_END = ("the end of the step", None)

captures: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
"""Captures what the engine keeps for each thread, such as the current GPU; the result is entered in another one."""


def helper(name: str, function: Callable[..., None], *args: Any, daemon: bool = True) -> threading.Thread:
    """Returns a thread, not started yet, which has what the engine keeps for the thread that calls this."""
    state = captures()

    def call() -> None:
        with state:
            function(*args)

    return threading.Thread(target=call, name=name, daemon=daemon)


class _Stopped(BaseException):
    """Ends a replica because another one has failed."""


class Baton:
    """Whose turn it is among the replicas of one step; their names are for messages."""

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
        """Waits for the first turn. The first replica has it already."""
        if index > 0:
            self._wait(index)

    def meet(self, index: int, what: tuple[Any, ...], value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Brings a value, waits until all replicas have, and returns what `combine` makes of them, called once.

        Raises:
            WorkerMismatchError: The replicas came for different things.
        """
        if self.error is not None:
            raise _Stopped
        self._brought[index] = (what, value)
        last = index == len(self._turns) - 1
        if last:
            self._check_same()
            values = [value for _, value in self._brought]
            self._brought = [None] * len(values)  # not held until the next meeting
            self._result = combine(values)
        self._hand_to(0 if last else index + 1)
        self._wait(index)
        return self._result

    def end(self, index: int, error: BaseException | None) -> None:
        """Ends a replica, well or badly, and hands on the baton. No replica may end while others go on."""
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
        except BaseException as interrupt:  # Ctrl-C comes to the first replica, whoever has the baton
            self.error = self.error or interrupt
            # The interrupt may have come just before the baton, or just after it.
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
                    hint="Remove branches on the replica, or on the values of its rows, from the training step.",
                )


def _describe(what: tuple[Any, ...]) -> str:
    kind, details = what
    return kind if details is None else f"the {kind} of {details}"


class ReplicaThreads:
    """Runs a function once a replica: for the first in the calling thread, for each other in its own.

    The threads are kept from step to step, since a new thread costs PyTorch a new pool of helpers; they end
    with this object, or with the program.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._tasks: list[queue.SimpleQueue[Any]] = []
        weakref.finalize(self, _close, self._tasks)

    def run(self, function: Callable[[int, Baton], Any]) -> list[Any]:
        """Calls `function(index, baton)` for each replica, one at a time; returns what each call returned.

        Raises what the first failing call raised, once all have ended.
        """
        baton = Baton(self._names)
        if len(self._names) == 1:
            return [function(0, baton)]
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
            tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
            name = f"kdist {self._names[len(self._tasks) + 1]}"
            threading.Thread(target=_work, args=(tasks,), name=name, daemon=True).start()
            self._tasks.append(tasks)


class Errands:
    """Makes calls in a thread of its own, one after the other. The thread does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_errands, args=(self._calls,), name=name, daemon=True)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function soon; returns its future."""
        if not self._thread.ident:
            self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def is_here(self) -> bool:
        """Says whether this is that thread."""
        return self._thread is threading.current_thread()


def _run_errands(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        future, function, args = calls.get()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del future, function, args


def _run_one(function: Any, index: int, baton: Baton, results: list[Any], finished: Any) -> None:
    error: BaseException | None = None
    try:
        baton.begin(index)
        results[index] = function(index, baton)
    except BaseException as raised:
        error = raised
    baton.end(index, error)
    finished.put(None)


def _work(tasks: queue.SimpleQueue[Any]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        context, function, arguments = task
        context.run(function, *arguments)
        del task, context, function, arguments  # else the last step's model would live on in an idle thread


def _close(tasks: list[queue.SimpleQueue[Any]]) -> None:
    for task in tasks:
        task.put(None)
