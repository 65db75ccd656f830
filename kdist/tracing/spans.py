"""`span`: marks what a worker does for a while. Where nobody wants to know, it costs the look whether somebody does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# What a worker does, and what a span's own time counts as, without that of the spans inside.
INPUT, STEP, EXCHANGE, SAVE, CALLBACKS = "input", "step", "exchange", "save", "callbacks"
# A pass of its own, in the middle of a fit or by itself.
VALIDATION, PREDICTION = "validation", "prediction"
# What consists of the others: an epoch, a fit.
LOOP = "loop"

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class Sink(Protocol):
    """Who wants to know of spans."""

    def add(self, span: Span) -> None:
        """Called at the end of each span, in the thread that it was in."""


class Span:
    """A stretch of time in one thread.

    Args:
        name: What is done: "step", "all_reduce".
        category: What it counts as.
        about: What else there is to say, as JSON: `{"step": 3}`.
    """

    __slots__ = ("_token", "about", "begin", "category", "end", "inside", "name", "parent", "root_thread")
    parent: Span | None
    root_thread: int
    begin: int
    end: int

    def __init__(self, name: str, category: str, about: dict[str, Any]) -> None:
        self.name = name
        self.category = category
        self.about = about
        self.inside = 0
        """Nanoseconds of the spans inside."""

    def __enter__(self) -> Span:
        self.parent = _innermost.get()
        # Replicas run in threads that take over the context of the step.
        self.root_thread = threading.get_ident() if self.parent is None else self.parent.root_thread
        self._token: Token[Span | None] = _innermost.set(self)
        self.begin = time.perf_counter_ns()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end = time.perf_counter_ns()
        _innermost.reset(self._token)
        if self.parent is not None:
            self.parent.inside += self.end - self.begin
        for sink in _sinks:
            sink.add(self)

    def outer(self) -> Iterator[Span]:
        """Yields the spans that this one is in, the innermost first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


_innermost: ContextVar[Span | None] = ContextVar("kdist_span", default=None)
_sinks: tuple[Sink, ...] = ()


def span(name: str, category: str, **about: Any) -> AbstractContextManager[Any]:
    """Entered for the time that something takes.

    Example:

    >>> from kdist.tracing import Meter, span
    >>> meter = Meter()
    >>> with meter, span("reading", "input"):
    ...     pass
    >>> sorted(meter.take().seconds)
    ['input']
    """
    return Span(name, category, about) if _sinks else _NOTHING


def timed(items: Iterable[T], name: str, category: str) -> Iterator[T]:
    """Yields the items; each time that the next one is awaited is a span."""
    iterator = iter(items)
    try:
        while True:
            with span(name, category):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


def add_sink(sink: Sink) -> None:
    """From now on, tells it of all spans."""
    global _sinks
    if sink not in _sinks:
        _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Tells it no more."""
    global _sinks
    _sinks = tuple(other for other in _sinks if other is not sink)


def _in_child() -> None:
    global _sinks
    _sinks = ()


if hasattr(os, "register_at_fork"):  # a loader's processes have nothing to say to their parent's files
    os.register_at_fork(after_in_child=_in_child)
