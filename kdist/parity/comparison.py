"""Compares the results of two runs, and lists the differences with likely reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.errors import InvalidArgumentError
from kdist.parity.training import Training

# Sums over other groups of rows differ in the last digits of float32; the effect of an error is far larger.
RTOL, ATOL = 1e-5, 2e-6
# Training can enlarge these differences: Adam divides by gradients, and relu has a kink.
_GROWN = 1e-2
_MOST = 8


def check_options(epochs: int, rtol: float, atol: float, strategy: Any) -> None:
    """Checks the options of a comparison.

    Raises:
        InvalidArgumentError: If there is nothing to compare, or `strategy` is not a function.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidArgumentError(
            "`epochs` is not an integer of at least 1.",
            received={"epochs": epochs},
            hint="Pass the number of epochs, for example: epochs=2",
        )
    if not (rtol >= 0 and atol >= 0):
        raise InvalidArgumentError(
            "`rtol` or `atol` is not a number of at least 0.",
            received={"rtol": rtol, "atol": atol},
            hint=f"Pass tolerances, for example: rtol={RTOL:g}, atol={ATOL:g}",
        )
    if strategy is not None and not callable(strategy):
        raise InvalidArgumentError(
            "`strategy` is not a function.",
            received={"strategy": strategy},
            hint="Pass a function that creates the strategy, because each worker creates its own:\n"
            'strategy=lambda: kdist.MirroredStrategy(["cpu:0", "cpu:1"])',
        )


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], rtol: float = RTOL, atol: float = ATOL
) -> dict[str, str]:
    """Returns a text for each value that differs, by name. NaN differs from everything."""
    import numpy as np

    found = dict.fromkeys(expected.keys() ^ actual.keys(), "only one of the two runs has this value")
    for name in [name for name in expected if name in actual]:
        # Some dtypes can be neither subtracted nor printed.
        one, many = (np.asarray(np.asarray(run[name]), "float64") for run in (expected, actual))
        if one.shape != many.shape:
            found[name] = f"shape {one.shape} on one device, {many.shape} with the strategy"
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
        count = (
            f"{int((~agrees).sum())} of {one.size} differ, largest difference{place}: "
            if one.size > 1
            else ""
        )
        found[name] = f"{count}{one[where]:.8g} on one device, {many[where]:.8g} with the strategy"
    return found


def explain(expected: Training, workers: Sequence[Training], rtol: float, atol: float) -> str | None:
    """Compares each worker with one device. Returns differences and likely reasons, or `None` if all agree.

    Args:
        expected: The results of one device.
        workers: The results of each worker.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        InvalidArgumentError: If the strategy has only one replica, so that a comparison proves nothing.
    """
    if workers[0].num_replicas < 2:
        raise InvalidArgumentError(
            "The strategy has only one replica, so a comparison with one device proves nothing.",
            received={"strategy": workers[0].title},
            hint="Pass num_workers=2, or a strategy with several devices.",
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
                f"{who} gives different results than one device: {len(found)} of {len(expected.numbers)} differ "
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
            "The initial weights differ. In `make_model`, take all random numbers from Keras, or from a generator "
            "with a fixed seed."
        ]
    reasons = list(expected.suspects)
    if not differences(expected.numbers, run.numbers, _GROWN, _GROWN):
        reasons.append(
            "Rounding: sums are added in a different order, and training enlarges the difference. Compare after fewer "
            "steps, use SGD instead of Adam, or pass rtol=1e-3 and atol=1e-4."
        )
    return reasons or [
        "The rows differ. `data` must return the same rows in the same order, in every process and on every call.",
        "A custom loss, metric or layer combines the rows of a batch. On TensorFlow and PyTorch, it sees only the rows "
        "of one replica.",
    ]
