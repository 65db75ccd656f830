"""What differs between two runs, by how much, and why that may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.errors import InvalidArgumentError
from kdist.parity.training import Training

# float32 sums over other groups of rows differ in the last digits; an error is far larger.
RTOL, ATOL = 1e-5, 2e-6
# What training can make of the last digits: Adam divides by gradients, relu has a kink.
_GROWN = 1e-2
_MOST = 8


def check_options(epochs: int, rtol: float, atol: float, strategy: Any) -> None:
    """Checks what both runs are told.

    Raises:
        InvalidArgumentError: If there is nothing to compare, or `strategy` is no function.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidArgumentError("`epochs` must be at least 1.", received={"epochs": epochs})
    if not (rtol >= 0 and atol >= 0):
        raise InvalidArgumentError("Tolerances must not be negative.", received={"rtol": rtol, "atol": atol})
    if strategy is not None and not callable(strategy):
        raise InvalidArgumentError(
            "`strategy` must be a function that makes one: each worker makes its own.",
            received={"strategy": strategy},
            hint='For example: strategy=lambda: kdist.MirroredStrategy(["cpu:0", "cpu:1"])',
        )


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], rtol: float = RTOL, atol: float = ATOL
) -> dict[str, str]:
    """Returns what differs: the name of each number or array, and by how much. NaN agrees with nothing."""
    import numpy as np

    found = dict.fromkeys(expected.keys() ^ actual.keys(), "only one of the two runs has it")
    for name in [name for name in expected if name in actual]:
        # Of every dtype, of which some can be neither subtracted nor printed.
        one, many = (np.asarray(np.asarray(run[name]), "float64") for run in (expected, actual))
        if one.shape != many.shape:
            found[name] = f"shape {one.shape} on one device, {many.shape} here"
            continue
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            distance = np.abs(many - one)
            agrees = distance <= atol + rtol * np.abs(one)
        if agrees.all():
            continue
        where = np.unravel_index(
            np.argmax(np.where(agrees, -1, np.nan_to_num(distance, nan=np.inf))), one.shape
        )
        place = f" at {[int(i) for i in where]}" if where else ""
        count = f"{int((~agrees).sum())} of {one.size} differ, most{place}: " if one.size > 1 else ""
        found[name] = f"{count}{one[where]:.8g} on one device, {many[where]:.8g} here"
    return found


def explain(expected: Training, workers: Sequence[Training], rtol: float, atol: float) -> str | None:
    """Says what differs between one device and each worker of a strategy, and why; `None` where nothing does.

    Args:
        expected: What one device gave.
        workers: What each worker gave.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        InvalidArgumentError: If the runs prove nothing, having one replica alone.
    """
    if workers[0].num_replicas < 2:
        raise InvalidArgumentError(
            "A strategy must have several replicas to be compared with one device.",
            received={"strategy": workers[0].title},
            hint="Pass num_workers=2, or a strategy of several devices.",
        )
    for index, run in enumerate(workers):
        found = differences(expected.numbers, run.numbers, rtol, atol)
        if not found:
            continue
        lines = [f"  {name}: {text}" for name, text in found.items()]
        left_out = [f"  and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
        who = f"{run.title}, worker {index}," if len(workers) > 1 else f"{run.title}"
        return "\n".join(
            [
                f"{who} gives other numbers than one device: {len(found)} of {len(expected.numbers)} differ "
                f"(rtol={rtol:g}, atol={atol:g}).",
                *lines[:_MOST],
                *left_out,
                "Likely reasons:",
                *(f"  - {reason}" for reason in _reasons(expected, run, list(found))),
            ]
        )
    return None


def _reasons(expected: Training, run: Training, found: Sequence[str]) -> list[str]:
    if any(name.startswith("before training") for name in found):
        return [
            "The model begins with other weights: `make_model` must draw all that it draws from Keras's seed, or "
            "from one of its own."
        ]
    reasons = list(expected.suspects)
    if not differences(expected.numbers, run.numbers, _GROWN, _GROWN):
        reasons.append(
            "Rounding, which training enlarges: sums are added up in another order. Compare after fewer steps, "
            "with SGD in place of Adam, or pass rtol=1e-3 and atol=1e-4."
        )
    return reasons or [
        "The rows differ: `data` must give the same rows, in the same order, in every process and at every call.",
        "A loss, a metric or a layer of your own couples the rows of a batch: it sees one replica's rows on "
        "TensorFlow and PyTorch.",
    ]
