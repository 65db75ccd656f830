"""Draws a few steps from the middle of a trace, with one row per worker."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.measuring.drawing import Chart, legend_below
from kdist.measuring.shares import COMPUTE, EXCHANGE, INPUT, PROGRAM, PYTHON, SAVE, SHARE_COLORS, VALIDATION
from kdist.tracing import merging, spans

_STEPS = 5
_NAMES = {
    spans.STEP: COMPUTE,
    spans.EXCHANGE: EXCHANGE,
    spans.INPUT: INPUT,
    spans.SAVE: SAVE,
    spans.CALLBACKS: PYTHON,
    spans.VALIDATION: VALIDATION,
}


def chart_of(folder: str) -> Chart | None:
    """Returns a chart of some steps in the middle of a trace, or `None` if there are no steps.

    If the directory has traces of several starts, the chart shows the last one.
    """
    found = [[event for event in merging.read(path) if _is_step(event)] for path in merging.files_in(folder)]
    steps = max(filter(None, found), key=lambda steps: steps[-1]["ts"], default=[])
    middle = steps[max(0, (len(steps) - _STEPS) // 2) :][:_STEPS]
    if not middle:
        return None
    begin, end = middle[0]["ts"], middle[-1]["ts"] + middle[-1]["dur"]
    margin = (end - begin) * 0.03
    everything = list(merging.read_all(folder))
    names = {event["pid"]: event["args"]["name"] for event in everything if event["name"] == "process_name"}
    seen = [
        event
        for event in everything
        if event.get("ph") == "X"
        and event["cat"] in _NAMES
        and event["ts"] + event["dur"] >= begin - margin
        and event["ts"] <= end + margin
    ]
    fused = "exchange inside" in middle[0]["name"]
    return Chart(
        f"{len(middle)} steps of the trace",
        "Thin bars show the other threads of a worker. To zoom into the whole trace, open trace.json at "
        "ui.perfetto.dev or in chrome://tracing.",
        functools.partial(_draw, seen, names, begin - margin, end + margin, fused),
    )


def _is_step(event: dict[str, Any]) -> bool:
    about = event.get("args", {})
    return "rows" in about and not about.get("first")


def _draw(
    events: Sequence[dict[str, Any]],
    names: Mapping[int, str],
    begin: float,
    end: float,
    fused: bool,
    axes: Any,
) -> None:
    rows = sorted({event["pid"] for event in events})
    labels = set()
    # Sorted so that spans inside another span are drawn on top of it.
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        name = PROGRAM if fused and event["cat"] == spans.STEP else _NAMES[event["cat"]]
        is_main = event["tid"] == 0
        y = rows.index(event["pid"]) + (0.0 if is_main else 0.38)
        start = max(event["ts"], begin)
        length = min(event["ts"] + event["dur"], end) - start
        label = None if name in labels else name
        labels.add(name)
        color = SHARE_COLORS[name]
        axes.barh(
            y,
            length / 1000,
            left=(start - begin) / 1000,
            height=0.5 if is_main else 0.18,
            color=color,
            linewidth=0,
            label=label,
        )
    axes.set_yticks(
        range(len(rows)), [re.split("[,(]", names.get(row, f"process {row}"))[0].strip() for row in rows]
    )
    axes.set_ylim(len(rows) - 0.4, -0.5)
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="y", visible=False)
    legend_below(axes, 0.22)
