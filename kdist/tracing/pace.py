"""Compares the training speed of workers, and finds the time that they wait for each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.tracing import spans
from kdist.tracing.meter import Totals


@dataclass(frozen=True)
class Pace:
    """The training speed of all workers over the same steps.

    Args:
        rows_per_second: The rows of global batches per second.
        waiting_for_input: The share of the time that a worker waits for data, averaged over the workers.
        waiting_for_others: The measurable share of the time that it waits for others; 0 with one worker.
        slowest: The index of the worker with the most work outside of exchanges, for which the others wait.
    """

    rows_per_second: float
    waiting_for_input: float
    waiting_for_others: float
    slowest: int


def together(totals: Totals, exchanges_in_programs: bool) -> float:
    """Returns the seconds that a worker spent in exchanges with the others, including waits.

    If a compiled program includes the exchange, this is the time of the whole program.
    """
    return totals.of(spans.EXCHANGE, *([spans.STEP] if exchanges_in_programs else []))


def alone(totals: Totals, exchanges_in_programs: bool) -> float:
    """Returns the seconds that a worker spent on its own work: input, Python, steps without exchange."""
    return max(totals.training - together(totals, exchanges_in_programs), 0.0)


def pace_of(everyone: Sequence[Totals], exchanges_in_programs: bool) -> Pace:
    """Compares the times of the workers over the same steps.

    The last worker to arrive at an exchange does not wait. Therefore, the shortest time in exchanges is their
    cost, and all time beyond it is waiting. If compiled programs include the exchange, the same applies to
    whole programs. Then differences between workers inside the programs are not visible.

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
