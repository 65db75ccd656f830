"""`kdist demo`: runs a script on one device and on several workers, and compares the results."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kdist.launch.local_workers import run_module

# float32 has 7 digits, and a hundred training steps enlarge differences in the last digit.
_TOLERANCE = 1e-3


def main(num_workers: int, backend: str | None, epochs: int) -> int:
    """Trains a small network on handwritten digits twice, and prints a table and whether both runs agree.

    Args:
        num_workers: The number of workers in the second run.
        backend: The Keras backend; by default the backend in `KERAS_BACKEND`.
        epochs: The number of epochs of each run.

    Returns:
        0 if the runs agree and the test accuracy is above 95%, 2 if scikit-learn is not installed, else 1.
    """
    if importlib.util.find_spec("sklearn") is None:
        print(
            "kdist demo: The package scikit-learn, which contains the data, is not installed.\n"
            "In your checkout of kdist, run: pip install '.[demo]'",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="kdist-demo-") as folder:
        print("Training on one device, with Keras only …", flush=True)
        one = _run(backend, epochs, 1, Path(folder) / "one.json", "--plain")
        print(f"\nTraining on {num_workers} workers, with kdist …", flush=True)
        many = _run(backend, epochs, num_workers, Path(folder) / "many.json")
    print(_report(one, many, num_workers))
    return 0 if _agree(one, many) and many["accuracy"] > 0.95 else 1


def _run(backend: str | None, epochs: int, num_workers: int, result: Path, *flags: str) -> dict[str, Any]:
    return run_module("kdist.demo.train", backend, num_workers, result, "--epochs", str(epochs), *flags)


def _weight_difference(one: dict[str, Any], many: dict[str, Any]) -> float:
    pairs = zip(one["weights"], many["weights"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)


def _agree(one: dict[str, Any], many: dict[str, Any]) -> bool:
    return _weight_difference(one, many) < _TOLERANCE and abs(one["loss"] - many["loss"]) < _TOLERANCE


def _report(one: dict[str, Any], many: dict[str, Any], num_workers: int) -> str:
    workers = f"{num_workers} workers"
    rows = [
        ("", "one device", workers),
        ("test loss", f"{one['loss']:.6f}", f"{many['loss']:.6f}"),
        ("test accuracy", f"{one['accuracy']:.2%}", f"{many['accuracy']:.2%}"),
        ("steps per second", f"{one['steps_per_second']:.1f}", f"{many['steps_per_second']:.1f}"),
        ("largest weight difference", "", f"{_weight_difference(one, many):.1e}"),
    ]
    lines = [f"  {name:27}{a:>14}{b:>14}" for name, a, b in rows]
    if _agree(one, many):
        verdict = f"The runs agree: {workers} trained the same network as one device."
    else:
        verdict = f"The runs DIFFER by more than {_TOLERANCE:g}. Please report this with the output of `kdist info`."
    return "\n".join(["", *lines, "", verdict])
