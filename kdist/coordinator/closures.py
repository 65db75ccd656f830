"""Closures that wait for a worker, and those that run: each is done once, whatever becomes of workers."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.backends.coordination import RemoteValue
from kdist.coordinator.staleness import Staleness
from kdist.errors import StrategyScopeError


class Cancelled(StrategyScopeError):
    """A function will not run, since another one has failed before."""


class Result(RemoteValue):
    """What a closure comes to."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: Any, error: BaseException | None = None) -> None:
        """Notes the value, or the error."""
        self._value, self._error = value, error
        self._done.set()

    def fetch(self) -> Any:
        """Waits for the function, and returns what it returned."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def get(self) -> Any:
        """As `fetch`, with tensors."""
        import keras

        return keras.tree.map_structure(
            lambda leaf: keras.ops.convert_to_tensor(leaf) if hasattr(leaf, "dtype") else leaf, self.fetch()
        )


@dataclasses.dataclass(eq=False)
class Closure:
    """A call of a function, with its place in the order of all.

    Args:
        index: Its number: by it the servers know its updates.
        fn: The function.
        args: Its positional arguments, which may be `RemoteValue`s.
        kwargs: Its keyword arguments.
        result: What it comes to.
        done: Called with what it came to, in the thread that has waited for it.
    """

    index: int
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Result
    done: Callable[[Any], None] | None = None


class Closures:
    """The closures of one job that are not done, for the threads that each drive one worker.

    Args:
        staleness: Says when another one may begin.
    """

    def __init__(self, staleness: Staleness) -> None:
        self._staleness = staleness
        self.are_in_turn = staleness.is_in_turn
        """Whether one runs after the other: then callbacks may wait for each, as on one device."""
        self._waiting: collections.deque[Closure] = collections.deque()
        self._running: dict[Closure, None] = {}
        self._next = 0
        self._error: BaseException | None = None
        self._lasting: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def add(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        done: Callable[[Any], None] | None = None,
    ) -> Result:
        """Adds a call at the end. Raises what an earlier one has raised."""
        with self._changed:
            self._raise()
            closure = Closure(self._next, fn, args, kwargs, Result(), done)
            self._next += 1
            self._waiting.append(closure)
            self._changed.notify_all()
            return closure.result

    @property
    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._closed

    def take(self, timeout: float) -> Closure | None:
        """Returns the next closure, to be run; `None` if there is none within some seconds."""
        with self._changed:
            begins = self._changed.wait_for(lambda: self._closed or self._begins(), timeout)
            if self._closed or not begins:
                return None
            closure = self._waiting.popleft()
            self._running[closure] = None
            return closure

    def _begins(self) -> bool:
        return bool(self._waiting) and self._staleness.begin(self._waiting[0])

    def again(self, closure: Closure) -> None:
        """Lets a closure run once more, before all others: its worker was lost, or something was missing."""
        with self._changed:
            self._end(closure)
            if self._error is None:
                self._waiting.appendleft(closure)
            else:
                closure.result.set(None, _cancelled(self._error))

    def end(self, closure: Closure, value: Any = None, error: BaseException | None = None) -> None:
        """Notes what a closure came to. After an error, those that wait are not run."""
        with self._changed:
            if error is None and closure.done is not None:
                closure.done(value)
            closure.result.set(value, error)
            self._end(closure)
            if error is not None:
                self._fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the job: every call raises this from now on."""
        with self._changed:
            self._lasting = self._lasting or error
            self._fail(error)
            for closure in self._running:
                closure.result.set(None, error)

    def oldest(self) -> int:
        """The lowest number of those that are not done: those below will not be repeated."""
        with self._changed:
            return min((closure.index for closure in [*self._running, *self._waiting]), default=self._next)

    def wait(self, at_most: int = 0) -> None:
        """Waits until so many are left. Raises what one of them has raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._left() <= at_most)
            if self._error is not None and self._lasting is None:
                self._changed.wait_for(lambda: not self._running or self._lasting)
            self._raise()

    def done(self) -> bool:
        """Says whether none is left. Raises what one of them has raised."""
        with self._changed:
            self._raise()
            return self._left() == 0

    def cancel(self) -> None:
        """Drops those that wait, and waits for those that run."""
        with self._changed:
            self._drop(
                Cancelled(
                    "The function was canceled, because the training that scheduled it has ended.",
                    hint="Wait for the function before training ends: coordinator.join()",
                )
            )
            self._changed.wait_for(lambda: not self._running or self._lasting is not None)
            self._error = self._lasting

    def close(self) -> None:
        """Lets the threads end that wait for closures."""
        with self._changed:
            self._closed = True
            self._drop(
                Cancelled(
                    "The function was canceled, because the coordinator has shut down.",
                    hint="Wait for the function before the program ends: coordinator.join()",
                )
            )
            self._changed.notify_all()

    def _left(self) -> int:
        return len(self._waiting) + len(self._running)

    def _end(self, closure: Closure) -> None:
        self._running.pop(closure, None)
        self._staleness.end(closure)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._drop(_cancelled(error))
        self._changed.notify_all()

    def _drop(self, error: BaseException) -> None:
        while self._waiting:
            self._waiting.popleft().result.set(None, error)

    def _raise(self) -> None:
        error, self._error = self._error, self._lasting
        if error is not None:
            raise error


def _cancelled(error: BaseException) -> Cancelled:
    return Cancelled(
        f"The function was canceled, because another function failed: {type(error).__name__}: {error}",
        hint="Fix that error, and schedule the function again.",
    )
