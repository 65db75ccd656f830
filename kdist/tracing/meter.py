"""`Meter`, which adds up how long a worker spends on each activity, for callbacks and `kdist bench`."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from kdist.tracing import spans
from kdist.tracing.spans import Span

# Categories whose spans count completely, including the spans inside.
_WHOLES = frozenset({spans.SAVE, spans.VALIDATION, spans.PREDICTION})
_FIRST = "first"


@dataclass
class Totals:
    """The activities of a worker in an interval of time.

    Args:
        elapsed: The length of the interval in seconds.
        steps: The number of training steps.
        rows: The number of rows in the global batches of these steps; 0 if unknown.
        seconds: The seconds per category: "input", "step", "exchange", "save", … The rest is Python code.
        compiles: Whether the interval only contains the first step of a step function, which compiles.
    """

    elapsed: float = 0.0
    steps: int = 0
    rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    compiles: bool = False

    def of(self, *categories: str) -> float:
        return sum(self.seconds.get(category, 0.0) for category in categories)

    @property
    def training(self) -> float:
        """The elapsed seconds without validation and predictions."""
        return max(self.elapsed - self.of(spans.VALIDATION, spans.PREDICTION), 0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Meter:
    """Adds up the spans of the thread that enters it, and of the replicas that this thread runs.

    The first step of a step function compiles, so the time until its end only counts if no step follows.
    """

    def __init__(self) -> None:
        self._compiling: Totals | None = None
        self._begin()

    def __enter__(self) -> Meter:
        self._begin()
        spans.add_sink(self)
        return self

    def __exit__(self, *exc: object) -> None:
        spans.remove_sink(self)

    def take(self) -> Totals:
        """Returns the totals since the last call or, at the first call, since entering the meter."""
        totals = self._totals
        totals.elapsed = time.perf_counter() - self._since
        if not totals.steps and self._compiling is not None:
            totals = self._compiling
        self._begin()
        return totals

    def add(self, span: Span) -> None:
        """Adds a span that has just ended."""
        if span.root_thread != self._thread or span.category == spans.LOOP:
            return
        if any(around.category in _WHOLES for around in span.outer()):
            return
        took = span.end - span.begin
        own = took if span.category in _WHOLES else took - span.inside
        totals = self._totals
        totals.seconds[span.category] = totals.seconds.get(span.category, 0.0) + own / 1e9
        if "rows" in span.about:
            totals.steps += span.about.get("steps", 1)
            totals.rows += span.about["rows"]
            if span.about.get(_FIRST):
                totals.elapsed, totals.compiles = time.perf_counter() - self._since, True
                self._begin()
                self._compiling = totals

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._since = time.perf_counter()
        self._totals = Totals()
        self._compiling = None
