"""Draws charts with matplotlib, as an image or as an HTML page without dependencies."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kdist import whole_files
from kdist.errors import InvalidArgumentError
from kdist.measuring.shares import SHARE_COLORS

# Colors that are easy to see on white and on black, and that most people can distinguish.
COLORS = ("#3b82f6", "#f97316", "#0d9f6e", "#db2777", "#8b5cf6", "#ca8a04", "#0891b2", "#ef4444")
GREY = "#888888"
# A placeholder for the text color of the page.
_INK = "#223344"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
_WIDTH, _HEIGHT = 5.2, 3.1  # inches per chart, so that its text is readable on a phone
ENDINGS = (".html", ".png")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #15181d; --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; }}
}}
body {{ margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; margin: .5rem 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05rem; margin: 0; }}
p {{ margin: .25rem 0 .75rem; }}
.note {{ color: var(--soft); font-size: .9rem; }}
.charts {{ display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 1rem 0 0; }}
svg {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{lead}</p>
<div class="wide">{table}</div>
<div class="charts">
{charts}
</div>
</body>
</html>
"""


@dataclass(frozen=True)
class Chart:
    """A chart of a report."""

    title: str
    note: str  # how to read the chart
    draw: Callable[[Any], None]  # on matplotlib axes


@dataclass(frozen=True)
class Report:
    """A table and charts with a title."""

    title: str
    lead: str  # a summary in one or two sentences
    table: Sequence[Sequence[str]]  # rows of text; the first row is the header
    charts: Sequence[Chart]
    second: Sequence[Sequence[str]] = ()  # another table, or none


def check_output(path: str) -> None:
    """Checks that a report can be written, before the program measures or reads anything.

    Raises:
        InvalidArgumentError: If the extension is wrong, the path is not writable, or matplotlib is missing.
    """
    if not path.endswith(ENDINGS):
        raise InvalidArgumentError(
            "The name of the output file does not end in .html or .png.",
            received={"output": path},
            hint="Choose a name such as report.html.",
        )
    whole_files.check_output(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError(
            "The package matplotlib, which draws the charts, is not installed.",
            hint="In your checkout of kdist, run: pip install '.[plot]'",
        ) from error


def write(report: Report, path: str) -> None:
    """Writes a report as a page or an image, by its extension. The file appears when it is complete."""
    data = _page(report).encode() if path.endswith(".html") else _picture(report)
    with whole_files.whole_file(path) as file:
        file.write(data)


def _figure(rows: int, columns: int, height: float = _HEIGHT) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH * columns, height * rows), layout="constrained")


def _page(report: Report) -> str:
    import matplotlib

    parts = []
    for number, chart in enumerate(report.charts):
        # A separate salt per drawing, because IDs in the SVGs of one page must not collide.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"kdist {number}"}):
            figure = _figure(1, 1)
            chart.draw(figure.add_subplot())
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        title, note = html.escape(chart.title), html.escape(chart.note)
        parts.append(
            f"<figure><h2>{title}</h2>{_inline(drawn.getvalue(), chart.title)}"
            f'<figcaption class="note">{note}</figcaption></figure>'
        )
    tables = [
        f"<table>{_row('th', rows[0])}{''.join(_row('td', row) for row in rows[1:])}</table>"
        for rows in (report.table, report.second)
        if rows
    ]
    return _PAGE.format(
        title=html.escape(report.title),
        lead=html.escape(report.lead),
        table="<br>".join(tables),
        charts="\n".join(parts),
    )


def _row(tag: str, words: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(word)}</{tag}>' for word in words)}</tr>"


def _inline(svg: str, title: str) -> str:
    """Adapts an SVG for embedding in a page: it takes the text color and the width of the page."""
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _picture(report: Report) -> bytes:
    import matplotlib

    columns = min(2, len(report.charts))
    rows = -(-len(report.charts) // columns)
    with matplotlib.rc_context({**_STYLE, "figure.facecolor": "white"}):
        figure = _figure(rows, columns, _HEIGHT + 0.5)
        figure.suptitle(report.title, fontsize=13)
        for number, chart in enumerate(report.charts):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_title(chart.title, fontsize=11, loc="left")
            chart.draw(axes)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def draw_shares(axes: Any, rows: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Draws one stacked bar per row, from shares that add up to 1."""
    labels = set()
    for number, (_, shares) in enumerate(rows):
        left = 0.0
        for name, share in shares.items():
            color = SHARE_COLORS[name]
            label = None if name in labels else name  # rows may have different shares
            labels.add(name)
            axes.barh(number, share, left=left, color=color, height=0.6, label=label)
            if share > 0.07:
                middle = left + share / 2
                axes.text(middle, number, f"{share:.0%}", ha="center", va="center", color="white", size=9)
            left += share
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", visible=False)
    legend_below(axes, 0.1)


def draw_spread(axes: Any, points: Sequence[tuple[float, Sequence[float]]], color: str, label: str) -> None:
    """Draws a line through medians, and the range of the values at each point."""
    places = [x for x, _ in points]
    axes.plot(places, [median(values) for _, values in points], color=color, marker="o", label=label)
    axes.vlines(places, [min(values) for _, values in points], [max(values) for _, values in points], color)


def legend_below(axes: Any, distance: float) -> None:
    """Puts the legend below a chart, because bars leave no space inside."""
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -distance), fontsize=9)
