"""`span`, which measures an activity. Without sinks, it only costs the check whether there are any."""

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

# Categories of spans. The time of a span excludes the time of the spans inside it.
INPUT, STEP, EXCHANGE, SAVE, CALLBACKS = "input", "step", "exchange", "save", "callbacks"
# A separate pass over data, during `fit` or outside it.
VALIDATION, PREDICTION = "validation", "prediction"
# Spans that consist of others: an epoch, a fit.
LOOP = "loop"

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class Sink(Protocol):
    """A receiver of spans."""

    def add(self, span: Span) -> None:
        """Receives each span at its end, in the thread of the span."""


class Span:
    """An interval of time in one thread.

    Args:
        name: The name of the activity, for example "step" or "all_reduce".
        category: The category to which its time counts.
        about: Further details as JSON, for example `{"step": 3}`.
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
        """The nanoseconds in the spans inside this one."""

    def __enter__(self) -> Span:
        self.parent = _innermost.get()
        # Threads of replicas copy the context of the step, so the parent may be in another thread.
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
        """Yields the enclosing spans, the innermost first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


_innermost: ContextVar[Span | None] = ContextVar("kdist_span", default=None)
_sinks: tuple[Sink, ...] = ()


def span(name: str, category: str, **about: Any) -> AbstractContextManager[Any]:
    """Returns a context manager that measures an activity.

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
    """Yields the items. Each wait for the next item is a span."""
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
    """Passes all spans to a sink from now on."""
    global _sinks
    if sink not in _sinks:
        _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Stops passing spans to a sink."""
    global _sinks
    _sinks = tuple(other for other in _sinks if other is not sink)


def _in_child() -> None:
    global _sinks
    _sinks = ()


if hasattr(os, "register_at_fork"):  # child processes of data loaders must not write to the parent's files
    os.register_at_fork(after_in_child=_in_child)
