"""How fast several workers have trained together, and who has waited for whom."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.tracing import spans
from kdist.tracing.meter import Totals


@dataclass(frozen=True)
class Pace:
    """How fast the workers have trained, over the same steps.

    Args:
        rows_per_second: Rows of global batches.
        waiting_for_input: The share of the time in which a worker waits for its data, as a mean over the workers.
        waiting_for_others: The share in which it waits for others, as far as that is known; 0 for one worker.
        slowest: The worker that was busy with its own things for the longest time: the others have waited for it.
    """

    rows_per_second: float
    waiting_for_input: float
    waiting_for_others: float
    slowest: int


def together(totals: Totals, exchanges_in_programs: bool) -> float:
    """Seconds that a worker has spent in what all take part in, waiting for the others or not.

    Where a program exchanges inside of it, that is the whole program.
    """
    return totals.of(spans.EXCHANGE, *([spans.STEP] if exchanges_in_programs else []))


def alone(totals: Totals, exchanges_in_programs: bool) -> float:
    """Seconds that a worker was busy with its own things: input, Python, and its steps where they can be told."""
    return max(totals.training - together(totals, exchanges_in_programs), 0.0)


def pace_of(everyone: Sequence[Totals], exchanges_in_programs: bool) -> Pace:
    """Compares what the workers have done in the same steps.

    Whoever comes last to an exchange waits for nobody there: the time of the worker that has spent the least in
    exchanges is what they take, and what another has spent beyond is waiting. Where the exchange is inside of a
    compiled program, the same holds for programs; workers that differ within them cannot be told apart then.

    Example:

    >>> from kdist.tracing.meter import Totals
    >>> from kdist.tracing.pace import pace_of
    >>> fast = Totals(10.0, steps=5, rows=500, seconds={"step": 2.0, "exchange": 7.0, "input": 1.0})
    >>> slow = Totals(10.0, steps=5, rows=500, seconds={"step": 8.0, "exchange": 1.0, "input": 1.0})
    >>> pace_of([fast, slow], exchanges_in_programs=False)
    Pace(rows_per_second=50.0, waiting_for_input=0.1, waiting_for_others=0.3, slowest=1)
    """
    elapsed = max(max(totals.training for totals in everyone), 1e-9)
    waits = [together(totals, exchanges_in_programs) for totals in everyone]
    busy = [alone(totals, exchanges_in_programs) for totals in everyone]
    return Pace(
        rows_per_second=everyone[0].rows / elapsed,
        waiting_for_input=statistics.mean(totals.of(spans.INPUT) for totals in everyone) / elapsed,
        waiting_for_others=(statistics.mean(waits) - min(waits)) / elapsed,
        slowest=busy.index(max(busy)),
    )
