"""`kdist plot` and `kdist bench` report the right results for records written by hand."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from kdist.command_line import main
from kdist.measuring import bench, records, run_report, timeline
from kdist.measuring.bench import Measured, Plan
from kdist.measuring.drawing import COLORS, Chart, draw_shares
from kdist.measuring.shares import COMPUTE, EXCHANGE, PROGRAM, PYTHON, SHARE_COLORS
from kdist.tracing import Totals

START = {
    "start": True,
    "num_workers": 2,
    "backend": "torch",
    "exchanges_in_programs": False,
    "devices": ["cpu:0"],
}


def write_worker(folder: Path, worker: int, compute: float, starts: int = 1) -> None:
    """Writes two epochs of four steps, 0.1 s each, in records of two; time beyond `compute` is exchange."""
    lines: list[dict[str, Any]] = []
    for start in range(starts):
        lines.append(START | {"worker": worker, "host": f"host{worker}"})
        for epoch in range(1 + start, 3):
            for step in (2, 4):
                seconds = {"step": compute, "exchange": 0.2 - compute}
                totals = {"elapsed": 0.2, "steps": 2, "rows": 20, "seconds": seconds, "compiles": False}
                loss = {"loss": 1 / (4 * epoch + step) + worker}
                lines.append({"epoch": epoch, "step": step, "epoch_end": False, "logs": loss} | totals)
            nothing = {"elapsed": 0.0, "steps": 0, "rows": 0, "seconds": {}, "compiles": False}
            logs = {"loss": 1.0 + worker, "val_loss": [None, 0.5][epoch - 1]}
            lines.append({"epoch": epoch, "step": 4, "epoch_end": True, "logs": logs} | nothing)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"worker-{worker}.jsonl").write_text(
        text + '{"epoch": 3, "ste'
    )  # killed in the middle of a line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the run of two workers; the second computes for longer."""
    write_worker(tmp_path, 0, 0.05)
    write_worker(tmp_path, 1, 0.15)
    return tmp_path


@pytest.mark.kills("records_of_repeated_steps_kept")
def test_records_are_those_of_the_last_time_that_a_step_was_trained(tmp_path: Path) -> None:
    write_worker(tmp_path, 0, 0.05, starts=2)
    (log,) = records.read_run(str(tmp_path)).workers
    once = [(2, False), (4, False), (4, True)]
    assert [record.place for record in log.records] == [(epoch, *rest) for epoch in (1, 2) for rest in once]
    assert len(log.starts) == 2 and log.totals.rows == 80


def test_a_report_names_the_worker_that_the_others_wait_for(folder: Path) -> None:
    report = run_report.read_report(str(folder))
    assert "2 workers on torch, 8 steps measured, 100 rows/s" in report.lead
    assert "25% waiting for other workers; the slowest is worker 1." in report.lead
    head, *rows = report.table
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["host"], first["ms per step"], first["busy ms per step"]) == ("host0", "100.0", "25.0")
    assert (first["compute"], first["exchange"], first["Python"]) == ("25%", "75%", "0%")
    assert (second["ms per step"], second["busy ms per step"]) == ("100.0", "75.0")


def test_a_job_that_went_on_with_fewer_workers_misses_no_file(folder: Path) -> None:
    with open(folder / "worker-0.jsonl", "a") as file:
        file.write("\n" + json.dumps(START | {"worker": 0, "host": "host0", "num_workers": 1}) + "\n")
    assert "missing from this directory" not in run_report.read_report(str(folder)).lead
    (folder / "worker-1.jsonl").unlink()
    write_worker(folder, 0, 0.05)
    assert (
        "The files of 1 worker are missing from this directory." in run_report.read_report(str(folder)).lead
    )


def test_a_trace_that_nothing_can_be_written_beside_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    write_trace(folder, "worker-0.json", 0.0)
    monkeypatch.setattr(run_report.merging, "merge", refuse)
    assert [chart.title for chart in run_report.read_report(str(folder)).charts][-1] == "1 steps of the trace"


def write_trace(folder: Path, name: str, begin: float, rows: int = 8) -> None:
    """Writes the trace of one start with a single step."""
    who = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"task of {name} (host, process 1)"}}
    event = {"name": "step", "cat": "step", "ph": "X", "ts": begin, "dur": 9.0, "pid": 0, "tid": 0}
    event |= {"args": {"rows": rows} if rows else {}}
    (folder / name).write_text(f"[\n{json.dumps(who)},\n{json.dumps(event)}")


def test_steps_of_a_trace_are_those_of_the_last_start(tmp_path: Path) -> None:
    for name, begin, rows in (
        ("worker-0.json", 5.0, 8),
        ("worker-0-2.json", 900.0, 8),
        ("worker-1.json", 990.0, 0),
    ):
        write_trace(tmp_path, name, begin, rows)
    chart = timeline.chart_of(str(tmp_path))
    assert chart is not None and [event["ts"] for event in chart.draw.args[0]] == [900.0]  # type: ignore[attr-defined]


@pytest.mark.kills("plot_with_empty_axes")
def test_a_page_opens_anywhere(folder: Path, capsys: Any) -> None:
    (folder / "trace").mkdir()
    write_trace(folder / "trace", "worker-0.json", 0.0)
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    page = (folder / "report.html").read_text(encoding="utf-8")
    drawings = re.findall("<svg .*?</svg>", page, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings[:2]:  # each line's color is in the legend and in the axes
        assert [drawing.count(f"stroke: {color}") for color in (*COLORS[:2], COLORS[2])] == [2, 2, 0]
    assert ">task of worker-0.json<" in drawings[-1], "rows have the names that the trace has given them"
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page), "it loads nothing"
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    ids = [name for svg in drawings for name in set(re.findall(r'clipPath id="(\w+)"', svg))]
    assert len(ids) == len(set(ids)) >= 4, "no drawing cuts another one"
    assert json.loads((folder / "trace" / "trace.json").read_text())[1]["name"] == "step"


@pytest.mark.kills("plot_picture_with_empty_axes")
def test_a_picture_is_one(folder: Path) -> None:
    assert main(["plot", str(folder), "-o", str(folder / "run.png")]) == 0
    pixels = matplotlib.image.imread(folder / "run.png")[..., :3]
    for color in (*COLORS[:2], SHARE_COLORS[COMPUTE], SHARE_COLORS[EXCHANGE]):
        assert np.any(np.all(np.abs(pixels - matplotlib.colors.to_rgb(color)) < 0.01, axis=-1)), color


def drawn(chart: Chart) -> Any:
    """Draws a chart, and returns its axes."""
    axes = Figure().add_subplot()
    chart.draw(axes)
    return axes


def lines(chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """Returns the points of each line of a chart."""
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in drawn(chart).lines
    }


def bars(chart: Chart) -> list[tuple[float, float, float]]:
    """Returns the row, the start and the length of each bar of a chart."""
    return [
        (round(bar.get_y() + bar.get_height() / 2, 6), round(bar.get_x(), 6), round(bar.get_width(), 6))
        for bar in drawn(chart).patches
    ]


@pytest.mark.kills("plot_draws_the_first_worker_for_all")
def test_charts_show_the_records_of_each_worker(folder: Path) -> None:
    write_trace(folder, "worker-0.json", 1000.0)
    losses, times, shares, trace = run_report.read_report(str(folder)).charts
    steps = [2, 4, 4, 6, 8, 8]
    loss = [1 / 6, 1 / 8, 1.0, 1 / 10, 1 / 12, 1.0]
    assert lines(losses) == {
        "worker 0": list(zip(steps, loss, strict=True)),
        "worker 1": [(step, one + 1) for step, one in zip(steps, loss, strict=True)],
        "validation": [(8, 0.5)],
    }
    milliseconds = {"worker 0": 25.0, "worker 1": 75.0, "whole step": 100.0}
    assert {name: [(x, round(y, 6)) for x, y in points] for name, points in lines(times).items()} == {
        name: [(step, y) for step in (2, 4, 6, 8)] for name, y in milliseconds.items()
    }
    assert [bar for bar in bars(shares) if bar[2]] == [
        (0, 0.0, 0.25),
        (0, 0.25, 0.75),
        (1, 0.0, 0.75),
        (1, 0.75, 0.25),
    ]
    assert [text.get_text() for text in drawn(shares).get_yticklabels()] == ["worker 0", "worker 1"]
    assert bars(trace) == [(0, 0.00027, 0.009)]  # milliseconds, after a margin of 3 %


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plot", "{folder}/none"], "No run found: "),
        (["plot", "{folder}"], "has no records of kdist.callbacks.RunLog"),
        (["plot", "{folder}", "--output", "run.pdf"], "does not end in .html or .png"),
        (["plot", "{folder}", "--output", "{folder}/none/run.png"], "Cannot write the output file."),
        (["plot", "{folder}", "--output", "{folder}/" + 300 * "x" + ".png"], "error='File name too long'"),
        (["bench", "--num-workers", "1,two"], "--num-workers is not a whole number"),
        (["bench", "--steps", "0"], "--steps is not a whole number of at least 1"),
        (["bench", "--json", "{folder}/none/b.json"], "mkdir -p {folder}/none"),
        (["bench", "--json", "{folder}"], "error='Is a directory'"),
        (["bench", "--plot", "b.txt"], "does not end in .html or .png"),
    ],
)
def test_wrong_calls(arguments: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    assert said.format(folder=tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["plot", str(folder)]) == 2
    assert "pip install '.[plot]'" in capsys.readouterr().err


def measured(num_workers: int, seconds: float, fused: bool = False, **shares: float) -> Measured:
    """Returns three rounds of 10 steps with 64 rows; the last round was disturbed."""
    about = {"num_workers": num_workers, "num_replicas": num_workers, "exchanges_in_programs": fused}
    about |= {"backend": "jax" if fused else "torch", "device": "cpu:0"}
    rounds = [
        [Totals(time, 10, 640, {name: time * share for name, share in shares.items()})] * num_workers
        for time in (seconds, seconds, 7 * seconds)
    ]
    return Measured(about, rounds)


def test_the_table_of_a_benchmark() -> None:
    everyone = [measured(1, 2.0, step=0.9), measured(4, 1.0, step=0.6, exchange=0.3, input=0.05)]
    head, one, four = bench.table(everyone)
    assert dict(zip(head, one, strict=True)) == {
        "workers": "1",
        "steps/s": "5.00",
        "rows/s": "320",
        "efficiency": "100%",
        "compute": "90%",
        "exchange": "0%",
        "both": "90%",
        "input": "0%",
        "Python": "10%",
    }
    assert four == ["4", "10.00", "640", "50%", "60%", "30%", "90%", "5%", "5%"]
    plan = Plan(batch_size=64, steps=10)
    assert "global batch size 64, median of 3 rounds with 10 steps each." in bench.notes(plan, everyone)[0]
    said = bench.as_json(plan, everyone)
    assert [result["efficiency"] for result in said["results"]] == [1.0, 0.5]
    assert json.loads(json.dumps(said)) == said
    speeds, shares = bench.report(Plan(), everyone).charts
    assert lines(speeds) == {"ideal": [(1, 320.0), (4, 1280.0)], "measured": [(1, 320.0), (4, 640.0)]}
    assert [bar for bar in bars(shares) if bar[2]] == [
        (0, 0.0, 0.9),
        (0, 0.9, 0.1),
        (1, 0.0, 0.6),
        (1, 0.6, 0.3),
        (1, 0.9, 0.05),
        (1, 0.95, 0.05),
    ]


def test_it_says_what_it_has_done_where_there_were_fewer_rows_than_it_was_asked_for() -> None:
    few = [measured(1, 2.0, step=0.9)]  # 10 steps, 640 rows
    plan = Plan(batch_size=64, steps=20)
    said = " ".join(bench.notes(plan, few))
    assert "global batch size 64, median of 3 rounds with 10 steps each." in said
    assert "The data has only 640 rows, fewer than 20 steps of 64 rows need." in said
    assert bench.as_json(plan, few)["steps"] == 10
    assert "global batch size 640," in bench.notes(Plan(batch_size=1000), few)[0]


@pytest.mark.kills("bench_promises_by_workers")
def test_workers_that_share_the_gpus_of_one_promise_no_more_than_it() -> None:
    one, two = measured(1, 2.0, step=0.9), measured(2, 2.0, step=0.9)
    for alike in (one, two):
        alike.about["num_replicas"] = 8
    assert bench.efficiency(two, one) == 1.0


def test_the_legend_has_the_shares_of_all_rows() -> None:
    axes = Figure().add_subplot()
    draw_shares(axes, [("1", {COMPUTE: 0.9, PYTHON: 0.1}), ("2", {PROGRAM: 0.9, PYTHON: 0.1})])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [COMPUTE, PYTHON, PROGRAM]


@pytest.mark.kills("bench_makes_up_shares")
def test_what_cannot_be_told_is_not_made_up() -> None:
    alone, together = measured(1, 2.0, fused=True, step=0.9), measured(2, 1.5, fused=True, step=0.8)
    assert bench.table([alone])[1][4:] == ["90%", "0%", "90%", "0%", "10%"], "one replica exchanges nothing"
    assert bench.table([alone, together])[2][4:] == ["-", "-", "80%", "0%", "20%"]
    said = " ".join(bench.notes(Plan(), [alone, together]))
    assert "the compiled step includes the exchange" in said and "share the" in said
