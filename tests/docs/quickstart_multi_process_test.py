"""Runs the file of the quickstart as the page describes, and compares it with the script for one device."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.docs.examples import example
from tests.helpers.compare import assert_close
from tests.helpers.environment import ROOT
from tests.helpers.processes import each_backend_in_twelve_turns, run, run_plain
from tests.helpers.scripts import run_python

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
TRAIN = example("quickstart_0")
SAVE = 'model.save("model.keras")\n'


@each_backend_in_twelve_turns
def test_the_file_trains_on_two_workers_as_the_page_says(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (command,) = re.findall(r"^\$ kdist (run --num-workers 2 train\.py)$", PAGE, re.MULTILINE)
    done = run_python("-m", "kdist", *shlex.split(command), cwd=tmp_path, timeout=150, KERAS_BACKEND=backend)
    printed = done.stdout + done.stderr
    shown = re.search(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown
    for line in shown[1].splitlines():
        line = line.replace("jax/gloo", f"{backend}/\N{HORIZONTAL ELLIPSIS}").replace(
            "on jax", f"on {backend}"
        )
        pattern = re.escape(line).replace("\N{HORIZONTAL ELLIPSIS}", r"\w+")
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{line!r} is not in\n{printed}"
    assert "[worker 1] Epoch" not in printed
    assert "16/16" in done.stdout, "steps of an epoch"
    losses = [float(loss) for loss in re.findall(r"\bloss: ([\d.]+).*val_accuracy", done.stdout)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert float(re.findall(r"val_accuracy: ([\d.]+)", done.stdout)[-1]) > 0.95
    assert (tmp_path / "model.keras").is_file()


def before_the_change() -> str:
    """Returns the script for one device: the file, with each hunk of the page's diff reverted."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    source = TRAIN
    for part in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        old, new = (
            "".join(f"{line[1:]}\n" for line in part.splitlines() if not line.startswith(other))
            for other in "+-"
        )
        assert source.count(new) == 1, f"the file does not have\n{new}"
        source = source.replace(new, old)
    return source


def trained(source: str) -> tuple[Any, dict[str, list[float]]]:
    """Runs a script without its last save in a worker, and returns the weights and the history."""
    assert SAVE in source
    names: dict[str, Any] = {}
    exec(source.replace(SAVE, ""), names)
    return names["model"].get_weights(), names["model"].history.history


@pytest.mark.xdist_group("pool-torch")
def test_both_sides_of_the_difference_train_the_same() -> None:
    before = before_the_change()
    assert "kdist" not in before
    weights, history = run_plain("torch", trained, before)
    for shared_weights, shared_history in run("torch", 2, trained, TRAIN):
        assert shared_history == {name: pytest.approx(values, rel=1e-4) for name, values in history.items()}
        assert_close(shared_weights, weights, rtol=1e-4, atol=1e-5)
