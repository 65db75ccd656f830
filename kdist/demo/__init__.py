"""`kdist demo`: the same script on one device and on several workers, and whether the numbers agree."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdist.errors import LaunchError

# float32 carries 7 digits; a hundred steps of training enlarge the differences of the last one.
_TOLERANCE = 1e-3
_EPOCHS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a small network on handwritten digits twice, prints a table, and says whether both runs agree.

    Args:
        argv: Command line arguments.

    Returns:
        0 if the runs agree and more than 95 % of the test digits are recognised, else 1.
    """
    parser = argparse.ArgumentParser(prog="kdist demo", description=__doc__)
    parser.add_argument("--num-workers", "-n", type=int, default=2)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--epochs", type=int, default=_EPOCHS)
    options = parser.parse_args(argv)
    if importlib.util.find_spec("sklearn") is None:
        print("kdist demo needs scikit-learn for its data: pip install 'kdist[demo]'", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kdist-demo-") as folder:
        print("One device, plain Keras …", flush=True)
        one = _run(options, 1, Path(folder) / "one.json", "--plain")
        print(f"\n{options.num_workers} workers, kdist …", flush=True)
        many = _run(options, options.num_workers, Path(folder) / "many.json")
    print(_report(one, many, options.num_workers))
    return 0 if _agree(one, many) and many["accuracy"] > 0.95 else 1


def _run(options: argparse.Namespace, num_workers: int, result: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kdist", "run", "--num-workers", str(num_workers)]
    if options.backend:
        command += ["--backend", options.backend]
    command += ["-m", "kdist.demo.train", "--result", str(result), "--epochs", str(options.epochs), *flags]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise LaunchError("The demo's training failed.", received={"exit_code": code}, hint="See above.")
    return json.loads(result.read_text())


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
        verdict = f"The runs agree: {workers} trained the network that one device trains."
    else:
        verdict = f"The runs DISAGREE by more than {_TOLERANCE:g}. Please report this, with `kdist info`."
    return "\n".join(["", *lines, "", verdict])


if __name__ == "__main__":
    sys.exit(main())
