"""`kdist plot`, which draws the records and the trace of a run."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Sequence
from typing import Any

from kdist.cluster.roles import number_of
from kdist.errors import InvalidArgumentError, malformed_as
from kdist.measuring import records, timeline
from kdist.measuring.drawing import COLORS, GREY, Chart, Report, draw_shares
from kdist.measuring.records import Record, Run
from kdist.measuring.shares import shares_of
from kdist.tracing import merging
from kdist.tracing.pace import alone, pace_of


def read_report(folder: str) -> Report:
    """Reads the directory of a run, and returns its report.

    It looks for traces in the directory and in its subdirectory `trace`. It merges them again, because a
    killed job may not have merged them.

    Raises:
        InvalidArgumentError: If there is nothing to draw, or if files are corrupt.
    """
    with malformed_as(
        lambda error: InvalidArgumentError(
            f"The records or traces in {folder!r} are corrupt.",
            received={"error": error},
            hint="Delete the corrupt files. Each worker has its own file.",
        )
    ):
        return _read_report(folder)


def _read_report(folder: str) -> Report:
    folders = filter(os.path.isdir, (folder, os.path.join(folder, "trace")))
    traces = [path for path in folders if merging.files_in(path)]
    for path in traces:
        with contextlib.suppress(OSError):  # the directory may be read-only
            merging.merge(path)
    charts = [chart for path in traces if (chart := timeline.chart_of(path)) is not None]
    if not records.has_records(folder) and charts:
        return Report(folder, "This run has a trace, but no records of kdist.callbacks.RunLog.", (), charts)
    run = records.read_run(folder)
    return Report(folder, _lead(run), _table(run), [*_charts(run), *charts])


def _lead(run: Run) -> str:
    about = run.about
    totals = [log.totals for log in run.workers]
    pace = pace_of(totals, run.exchanges_in_programs)
    missing = about["num_workers"] - len(run.workers)
    words = [
        f"{number_of('worker', about['num_workers'])} on {about['backend']}, {totals[0].steps:,} steps measured"
    ]
    words += [f"{pace.rows_per_second:,.0f} rows/s"] if totals[0].rows else []
    words += [f"{pace.waiting_for_input:.0%} of the time spent waiting for input"]
    if len(totals) > 1:
        words += [
            f"{pace.waiting_for_others:.0%} waiting for other workers; the slowest is worker "
            f"{run.workers[pace.slowest].worker}"
        ]
    text = ", ".join(words) + "."
    if missing > 0:  # negative if a job resumed with fewer workers
        text += f" The files of {number_of('worker', missing)} are missing from this directory."
    return text


def _table(run: Run) -> list[list[str]]:
    rows = [
        ["worker", "host", "ms per step", "busy ms per step", *shares_of(run.workers[0].totals, run.is_fused)]
    ]
    for log in run.workers:
        totals = log.totals
        steps = max(totals.steps, 1)
        shares = shares_of(totals, run.is_fused).values()
        rows.append(
            [
                f"worker {log.worker}",
                str(log.starts[-1]["host"]),
                f"{1000 * totals.training / steps:.1f}",
                f"{1000 * alone(totals, run.exchanges_in_programs) / steps:.1f}",
                *(f"{share:.0%}" for share in shares),
            ]
        )
    return rows


def _charts(run: Run) -> list[Chart]:
    inside = (
        " The compiled step includes the exchange here, so the charts do not show the work inside the step."
        if run.is_fused
        else ""
    )
    return [
        Chart(
            "Loss",
            "All workers report the loss of the global batch, so their lines overlap.",
            functools.partial(_draw_losses, run),
        ),
        Chart(
            "Time per step, and time that each worker is busy",
            "Gray is the whole step, which takes equally long on all workers. The others wait for the worker with the "
            "highest line." + inside,
            functools.partial(_draw_steps, run),
        ),
        Chart(
            "Where the time goes",
            "Python is the remaining time: callbacks and the training loop. Steps that compile are excluded."
            + inside,
            functools.partial(_draw_shares, run),
        ),
    ]


def _draw_losses(run: Run, axes: Any) -> None:
    before = run.positions()
    for number, log in enumerate(run.workers):
        points = [(before[r.epoch] + r.step, r.logs.get("loss")) for r in log.records if "loss" in r.logs]
        # Thicker lines for the first workers, because the lines of the last workers cover them.
        width = 2 + 3 * (len(run.workers) - 1 - number) / max(len(run.workers) - 1, 1)
        _line(axes, points, COLORS[number % len(COLORS)], f"worker {log.worker}", linewidth=width)
    ends = [r for r in run.workers[0].records if r.ends_epoch and "val_loss" in r.logs]
    if ends:
        points = [(before[r.epoch] + r.step, r.logs["val_loss"]) for r in ends]
        _line(axes, points, GREY, "validation", marker="o", linestyle="--", markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    if len(run.workers) + len(ends) > 1:
        axes.legend(ncols=2, loc="best")


def _draw_steps(run: Run, axes: Any) -> None:
    before = run.positions()
    fused = run.exchanges_in_programs
    whole: dict[int, list[float]] = {}
    for number, log in enumerate(run.workers):
        measured = [r for r in log.records if r.totals.steps and not r.totals.compiles]
        places = [before[r.epoch] + r.step for r in measured]
        for place, record in zip(places, measured, strict=True):
            whole.setdefault(place, []).append(_per_step(record, record.totals.training))
        busy = [_per_step(record, alone(record.totals, fused)) for record in measured]
        _line(
            axes, list(zip(places, busy, strict=True)), COLORS[number % len(COLORS)], f"worker {log.worker}"
        )
    points = [(place, statistics.median(whole[place])) for place in sorted(whole)]
    _line(axes, points, GREY, "whole step", zorder=1)
    axes.set(xlabel="step", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, loc="best")


def _per_step(record: Record, seconds: float) -> float:
    return 1000 * seconds / record.totals.steps


def _line(axes: Any, points: Sequence[tuple[int, Any]], color: str, label: str, **style: Any) -> None:
    present = [(x, y) for x, y in points if y is not None]
    if len(present) == 1:
        style.setdefault("marker", "o")
    axes.plot([x for x, _ in present], [y for _, y in present], color=color, label=label, **style)


def _draw_shares(run: Run, axes: Any) -> None:
    rows = [(f"worker {log.worker}", shares_of(log.totals, run.is_fused)) for log in run.workers]
    draw_shares(axes, rows)
