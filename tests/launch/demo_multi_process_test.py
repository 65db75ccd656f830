"""`kdist demo` trains plain Keras and two workers on the digits, and reports whether the results differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kdist import demo
from kdist.command_line import main
from tests.helpers.scripts import Script


@pytest.mark.in_turn(4)
@pytest.mark.skipif(
    demo.importlib.util.find_spec("sklearn") is None,
    reason="the digits are scikit-learn's, which is not there",
)
def test_two_workers_train_what_one_device_trains(tmp_path: Path) -> None:
    arguments = ["demo", "--backend", "jax", "--num-workers", "2", "--epochs", "6"]
    source = f"import sys\nfrom kdist.command_line import main\nsys.exit(main({arguments!r}))\n"
    script = Script(tmp_path, "demo", source, {}).finish(480)
    out = script.stdout()
    rows = dict(
        re.findall(r"^  (test loss|test accuracy|largest weight difference) +(.*)$", out, re.MULTILINE)
    )
    one, two = map(float, rows["test loss"].split())
    assert 0 < one < 0.5
    assert two == pytest.approx(one, rel=1e-5)
    assert float(rows["largest weight difference"]) < 1e-5
    assert all(float(percent.rstrip("%")) > 95 for percent in rows["test accuracy"].split())
    assert out.endswith("The runs agree: 2 workers trained the same network as one device.\n")
    plain, distributed = out.split("Training on 2 workers, with kdist")
    assert plain.count("Epoch 6/6") == 1 and "MultiWorkerMirrored" not in plain
    assert distributed.count("[worker 0] Epoch 6/6") == 1, "in two processes"
    assert "MultiWorkerMirrored on jax/gloo, 2 workers" in script.stderr()
    assert "[worker 1] Epoch" not in out, "of which the chief prints"


RESULT = {"loss": 0.1, "accuracy": 0.97, "steps_per_second": 10.0, "weights": [[[0.5, 1.0]], [0.25]]}
CHANGES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 0, "The runs agree: 3 workers"),
    ({"weights": [[[0.5, 1.002]], [0.25]]}, 1, "The runs DIFFER"),
    ({"loss": 0.102}, 1, "The runs DIFFER"),
    ({"accuracy": 0.94}, 1, "The runs agree: 3 workers"),
]


@pytest.mark.kills("demo_without_plain_keras")
@pytest.mark.parametrize(("change", "code", "verdict"), CHANGES)
def test_what_it_says_of_two_results(
    change: dict[str, Any], code: int, verdict: str, monkeypatch: Any, capsys: Any
) -> None:
    results = iter([RESULT, RESULT | change])
    calls = []

    def run(backend: str, epochs: int, num_workers: int, result: Path, *flags: str) -> dict[str, Any]:
        calls.append((num_workers, flags))
        return next(results)

    monkeypatch.setattr(demo, "_run", run)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: name)
    assert demo.main(3, "jax", 8) == code
    assert verdict in capsys.readouterr().out
    assert calls == [(1, ("--plain",)), (3, ())]


def test_it_needs_scikit_learn(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(2, None, 8) == 2
    assert "pip install '.[demo]'" in capsys.readouterr().err


@pytest.mark.kills("demo_without_epochs")
@pytest.mark.parametrize("option", ["--epochs", "--num-workers"])
def test_the_demo_needs_positive_numbers(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "main", lambda *_: 0)
    for number in ("0", "-1", "x"):
        assert main(["demo", f"{option}={number}"]) == 2
        assert f"kdist demo: {option} is not a whole number of at least 1.\n" in capsys.readouterr().err
