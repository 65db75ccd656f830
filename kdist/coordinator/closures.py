"""The queue of closures (scheduled functions), each of which is done once, even if workers are lost.

`Staleness` limits how many closures run concurrently, so that no closure computes on variables that are too old.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kdist.backends.coordination import RemoteValue
from kdist.errors import StrategyScopeError

_MOST = 64  # functions in a cache


class Cancelled(StrategyScopeError):
    """The function will not run, because an earlier function failed or training has ended."""


class NotDone(StrategyScopeError):
    """A function cannot be sent to a worker yet, because it needs the result of another function."""

    def __init__(self, result: Result) -> None:
        super().__init__(
            "The function needs the result of another function, which is not done.",
            hint="Wait for the other function first: coordinator.join()",
        )
        self.result = result


class Result(RemoteValue):
    """The result of a closure, which may still be running."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: object = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def set(self, value: object, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self._done.set()

    def fetch(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def get(self) -> Any:
        import keras

        return keras.tree.map_structure(
            lambda leaf: keras.ops.convert_to_tensor(leaf) if hasattr(leaf, "dtype") else leaf, self.fetch()
        )


@dataclasses.dataclass(eq=False)
class Closure:
    """A scheduled call of a function."""

    index: int  # in the order of scheduling; the servers identify its updates by this number
    fn: Callable[..., object]
    args: Sequence[object]  # may contain `RemoteValue`s
    kwargs: Mapping[str, object]
    result: Result
    done: Callable[[Any], None] | None = None  # receives the result, in the thread that drives the worker
    needs: Result | None = None  # which must be done first


class Staleness:
    """Decides when another closure may begin.

    A closure reads variables when it begins, and changes them when it ends. Updates in between make its own
    update stale. They come from closures that already run when it begins, or that begin while it runs.
    The maximum staleness is `most` updates; `None` for no limit. With 0, closures run one after another.

    Example:

    >>> from kdist.coordinator.closures import Staleness
    >>> bound = Staleness(1)
    >>> bound.begin("a"), bound.begin("b"), bound.begin("c")
    (True, True, False)
    >>> bound.end("a")
    >>> bound.begin("c")  # it would be the second beside "b"
    False
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.is_in_turn = most == 0
        """Whether closures run one after another."""
        # For each running closure, the number of other closures that ran when it began or have begun since.
        self._beside: dict[object, int] = {}

    def begin(self, closure: object) -> bool:
        """Returns whether a closure may begin now. If so, it counts as running."""
        if self._most is not None:
            others = max(self._beside.values(), default=0)
            if len(self._beside) > self._most or (self._beside and others + 1 > self._most):
                return False
        for other in self._beside:
            self._beside[other] += 1
        self._beside[closure] = len(self._beside)
        return True

    def end(self, closure: object) -> None:
        """Marks a closure as no longer running, because it is done or will be repeated."""
        self._beside.pop(closure, None)


class Closures:
    """The pending and running closures of one job, for the threads that drive the workers."""

    def __init__(self, staleness: Staleness) -> None:
        self._staleness = staleness
        self.are_in_turn = staleness.is_in_turn
        """Whether closures run one after another, so that callbacks can wait for each, as on one device."""
        self._waiting: collections.deque[Closure] = collections.deque()
        self._running: dict[Closure, None] = {}
        self._next = 0
        self._error: BaseException | None = None
        self._lasting: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def add(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        done: Callable[[Any], None] | None = None,
    ) -> Result:
        """Adds a call at the end of the queue. Raises the error of an earlier closure."""
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
        """Returns the next closure to run, or `None` if there is none within `timeout` seconds."""
        with self._changed:
            closure = self._changed.wait_for(lambda: self._closed or self._begin(), timeout)
            if not isinstance(closure, Closure):
                return None
            self._waiting.remove(closure)
            self._running[closure] = None
            return closure

    def _begin(self) -> Closure | None:
        for closure in self._waiting:
            if closure.needs is None or closure.needs.is_done:
                return closure if self._staleness.begin(closure) else None
        return None

    def again(self, closure: Closure) -> None:
        """Puts a closure back at the front, because it could not run yet or its worker was lost."""
        with self._changed:
            self._end(closure)
            if self._error is None:
                self._waiting.appendleft(closure)
            else:
                closure.result.set(None, _cancelled(self._error))

    def end(self, closure: Closure, value: object = None, error: BaseException | None = None) -> None:
        """Sets the result of a closure. An error cancels all pending closures."""
        with self._changed:
            if error is None and closure.done is not None:
                closure.done(value)
            closure.result.set(value, error)
            self._end(closure)
            if error is not None:
                self._fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the job: from now on, every call raises this error."""
        with self._changed:
            self._lasting = self._lasting or error
            self._fail(error)
            for closure in self._running:
                closure.result.set(None, error)

    def oldest(self) -> int:
        """Returns the lowest index of all closures that are not done. Lower indices will not be repeated."""
        with self._changed:
            return min((closure.index for closure in [*self._running, *self._waiting]), default=self._next)

    def wait(self, at_most: int = 0) -> None:
        """Waits until at most `at_most` closures are left. Raises the error of a failed closure."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._left() <= at_most)
            if self._error is not None and self._lasting is None:
                self._changed.wait_for(lambda: not self._running or self._lasting)
            self._raise()

    def done(self) -> bool:
        with self._changed:
            self._raise()
            return self._left() == 0

    def cancel(self) -> None:
        """Drops the pending closures, and waits for the running closures."""
        error = Cancelled(
            "The function was canceled, because the training that scheduled it has ended.",
            hint="Wait for the function before training ends: coordinator.join()",
        )

        def are_gone() -> bool:
            self._drop(error)  # again, because a running closure can be put back
            return not self._running or self._lasting is not None

        with self._changed:
            self._changed.wait_for(are_gone)
            self._error = self._lasting

    def close(self) -> None:
        """Drops the pending closures, and wakes the threads that wait for closures, so that they end."""
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


class Recent:
    """A cache that keeps the most recently used values.

    Coordinator and worker use their caches of functions in the same order, so that both contain the same functions.

    Example:

    >>> from kdist.coordinator.closures import Recent
    >>> recent = Recent(most=2)
    >>> for name in ("a", "b", "a", "c"):
    ...     recent.put(name, name.upper())
    >>> recent.get("a"), recent.get("b")
    ('A', None)
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._values: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Returns a value, or `None`, and marks it as most recently used."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: object) -> None:
        """Adds a value. If the cache is full, removes the least recently used value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()
