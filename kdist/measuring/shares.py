"""Computes the shares of time per activity, with names for tables and charts."""

from __future__ import annotations

from kdist.tracing import Totals, spans

COMPUTE, PROGRAM, EXCHANGE, MESSAGES, INPUT, SAVE, VALIDATION, PYTHON = (
    "compute",
    "step, exchange inside",
    "exchange",
    "messages",
    "input",
    "save",
    "validation",
    "Python",
)
SHARE_COLORS = {
    COMPUTE: "#3b82f6",
    PROGRAM: "#3b82f6",
    EXCHANGE: "#f97316",
    MESSAGES: "#f97316",
    INPUT: "#0d9f6e",
    SAVE: "#8b5cf6",
    VALIDATION: "#0891b2",
    PYTHON: "#888888",
}


def shares_of(totals: Totals, is_fused: bool) -> dict[str, float]:
    """Returns the share of the time per activity. The shares add up to 1.

    If the compiled step includes the exchange, only messages between steps are measured separately.

    Example:

    >>> from kdist.measuring.shares import shares_of
    >>> from kdist.tracing import Totals
    >>> shares = shares_of(Totals(8.0, seconds={"step": 4.0, "exchange": 2.0, "input": 1.0}), False)
    >>> {name: share for name, share in shares.items() if share}
    {'compute': 0.5, 'exchange': 0.25, 'input': 0.125, 'Python': 0.125}
    """
    seconds = {
        PROGRAM if is_fused else COMPUTE: totals.of(spans.STEP),
        MESSAGES if is_fused else EXCHANGE: totals.of(spans.EXCHANGE),
        INPUT: totals.of(spans.INPUT),
        SAVE: totals.of(spans.SAVE),
        VALIDATION: totals.of(spans.VALIDATION, spans.PREDICTION),
    }
    whole = max(totals.elapsed, sum(seconds.values()), 1e-9)
    seconds[PYTHON] = whole - sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()}
