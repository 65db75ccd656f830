"""`kdist bench --compare` and `--collectives` choose contenders, take turns, and compare the right numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kdist.command_line import main
from kdist.measuring import bench, collectives, drawing
from kdist.measuring.contenders import read_contenders
from kdist.tracing import Totals
from tests.measuring.reports_test import lines

# Seconds per round: kdist is twice as fast as DDP in the first round, and equally fast in the second.
SECONDS = {"kdist": (1.0, 4.0), "ddp": (2.0, 4.0), "keras": (8.0, 8.0)}


def job_of(calls: list[tuple[str, int, int]]) -> Any:
    """Returns a substitute for `run_module`, which records the kind, workers and rounds of each job."""

    def run_module(module: str, backend: str, num_workers: int, result: Path, *flags: str) -> dict[str, Any]:
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        kind, rounds = given["--kind"], int(given["--rounds"])
        calls.append((kind, num_workers, rounds))
        if kind == "collectives":
            sizes = [{"bytes": 2048, "kdist": [1e-6, 2e-6, 4e-6], "raw": [2e-6, 8e-6, 4e-6]}]
            return {"backend": "torch", "communication": "gloo", "num_workers": num_workers, "sizes": sizes}
        turn = sum(call[:2] == (kind, num_workers) for call in calls) - 1
        seconds = SECONDS[kind][turn]
        if kind != "kdist":
            return {"seconds": [seconds], "loss": 0.5}
        about = {"backend": "torch", "num_workers": num_workers, "num_replicas": num_workers, "loss": 0.5}
        about |= {"exchanges_in_programs": False, "device": "cpu:0"}
        totals = [Totals(seconds, 10, 640).as_json()] * num_workers
        return {"about": about, "rounds": [totals] * rounds}

    return run_module


@pytest.mark.kills("contenders_one_after_another", "contenders_ratio_upside_down")
def test_contenders_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(bench, "run_module", job_of(calls))
    arguments = ["bench", "--backend", "torch", "-n", "2", "--compare", "ddp, keras", "--rounds", "2"]
    assert main([*arguments, "--json", f"{tmp_path}/b.json", "--plot", f"{tmp_path}/b.html"]) == 0
    assert calls == [("kdist", 2, 1), ("ddp", 2, 1), ("keras", 0, 1)] * 2
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["results"][0]["over"] == {"ddp": [0.5, 1.0], "keras": [0.125, 0.5]}
    assert written["contenders"][0] == {"name": "ddp", "num_workers": 2, "seconds": [2.0, 4.0], "loss": 0.5}
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "2 DDP 3.75 (2.50 to 5.00) 0.75 (0.50 to 1.00)" in table
    assert "2 plain Keras 1.25 (1.25 to 1.25) 0.31 (0.12 to 0.50)" in table
    page = (tmp_path / "b.html").read_text()
    assert "<td>0.75 (0.50 to 1.00)</td>" in page and page.count("<table>") == 2


def test_contenders_are_in_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_module", job_of([]))
    plan = bench.Plan(backend="torch", rounds=2)
    chart = bench.report(plan, *bench.measure(plan, [1, 2], ["ddp", "keras"])).charts[0]
    drawn = lines(chart)
    assert drawn["DDP"] == [(1, 240.0), (2, 240.0)] and drawn["plain Keras"] == [(1, 80.0), (2, 80.0)]


@pytest.mark.kills("collectives_bandwidth_of_all_workers")
def test_collectives_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(bench, "run_module", job_of(calls))
    assert main(["bench", "--collectives", "--rounds", "3", "--json", f"{tmp_path}/c.json"]) == 0
    assert calls == [("collectives", 2, 3)], "a single worker exchanges nothing"
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "2 2,048 2 (1 to 4) 4 (2 to 8) 1.024 0.512 0.50 (0.25 to 1.00)" in table
    everyone = json.loads((tmp_path / "c.json").read_text())["all_reduce"]
    assert everyone[0]["sizes"][0]["raw"] == [2e-6, 8e-6, 4e-6]
    report = collectives.report(everyone)
    assert lines(report.charts[0]) == {"kdist, 2 workers": [(2048, 2.0)], "raw, 2 workers": [(2048, 4.0)]}
    drawing.write(report, f"{tmp_path}/c.png")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "keras,horovod"], "unknown contender.\nReceived: compare='horovod'"),
        (["--backend", "jax", "--compare", "ddp"], "--compare ddp needs the backend torch, but the backend is jax."),
        (["--backend", "torch", "--compare", "ddp", "--batch-size", "5"], "For example: --batch-size 6"),
        (["--collectives", "-n", "1"], "--collectives needs at least two workers"),
        (["--collectives", "--compare", "keras"], "measures no training"),
    ],
)  # fmt: skip
def test_wrong_calls(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(bench, "run_module", job_of(calls))
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err and not calls


@pytest.mark.kills("contenders_missing_package")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench, "run_module", job_of([]))  # starts no process even if the check is missing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "fabric" in name else name)
    assert main(["bench", "--backend", "torch", "--compare", "keras,fabric"]) == 2
    said = capsys.readouterr().err
    assert "The package lightning-fabric, which --compare fabric needs, is not installed." in said
    assert "Install it: pip install lightning-fabric" in said
    assert read_contenders("", "jax", 5, [2]) == []
    assert read_contenders("keras, keras", "jax", 5, [2]) == ["keras"], "plain Keras divides no batch"
