"""Compares the outputs of a tutorial's cell in two runs, possibly on different backends and machines."""

from __future__ import annotations

import base64
import difflib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from tests.helpers.processes import BACKENDS
from tests.notebooks import RICH, text_of

SAME = "same"
"""The tag of a cell whose text is equal on every backend."""
VARIES = "varies"
"""The tag of a cell whose numbers are different in each run."""
BACKEND = "backend"
"""The tag of a cell whose outputs depend on the backend."""
_TOLERANCE = 0.2  # of decimal numbers: backends round differently, and training multiplies the differences
_FACTOR = 2.0  # by which a figure may contain more or less color
_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)(?![\w.]*\d)")
_LIST = re.compile(r"\[*#[#,\s\[\]]*")


def backend_of(cells: Sequence[Any]) -> str | None:
    """Returns the backend that a tutorial ran on, according to its outputs."""
    found = re.search(
        rf"\b(?:on|backend:) ({'|'.join(BACKENDS)})\b", "".join(map(text_of, cells)), re.IGNORECASE
    )
    return found[1] if found else None


def difference_of(stored: Any, executed: Any, on_another_backend: bool = False) -> str | None:
    """Returns how the outputs of an executed cell differ from the stored ones, or `None` if they agree."""
    tags = stored.metadata.get("tags", ())
    if BACKEND in tags and on_another_backend:
        return None
    kinds, now = ([_kind(output) for output in cell.outputs] for cell in (stored, executed))
    if now != kinds:
        return f"has the outputs {now}, not {kinds}"
    if SAME in tags and text_of(executed) != text_of(stored):
        return _unified(text_of(stored).splitlines(), text_of(executed).splitlines())
    if not _agree(_lines(stored), _lines(executed), VARIES in tags):
        return _unified(*([line for line, _, _ in _lines(cell)] for cell in (stored, executed)))
    for before, after in zip(_figures(stored), _figures(executed), strict=True):
        paint = "color" if "color" in before else "gray"
        share = after.get(paint, 0.0)
        if not before[paint] / _FACTOR <= share <= before[paint] * _FACTOR:
            return f"has a figure of which {share:.2%} have {paint}, not {before[paint]:.2%}"
    return None


def _kind(output: Any) -> str:
    if output.output_type == "stream":
        return f"stream {output.name}"
    return next((kind for kind in RICH if kind in output.data), "text/plain")


def _lines(cell: Any) -> list[tuple[str, str, list[str]]]:
    """Returns the lines of a cell, each with its text without numbers, and with its numbers.

    The lines are sorted, because workers print in any order, and do not contain the backend's name. NumPy
    pads numbers with spaces, so several spaces count as one.
    """
    text = "\n".join(
        output["text"] if "text" in output else output.data.get("text/plain", "") for output in cell.outputs
    )
    text = re.sub(rf"\b({'|'.join(BACKENDS)})\b", "BACKEND", text)
    lines = [(line, _words(line), _NUMBER.findall(line)) for line in text.splitlines()]
    return sorted(lines, key=lambda line: (line[1], line[0]))


def _words(line: str) -> str:
    return re.sub(r"\s+(?=\s|\])", "", _NUMBER.sub("#", line))


def _agree(stored: Any, executed: Any, varies: bool) -> bool:
    if varies:
        stored, executed = ([_LIST.sub("#", words) for _, words, _ in lines] for lines in (stored, executed))
        return bool(stored == executed)
    return len(stored) == len(executed) and all(
        before[1] == now[1] and all(map(_are_close, before[2], now[2]))
        for before, now in zip(stored, executed, strict=True)
    )


def _are_close(stored: str, executed: str) -> bool:
    if "." not in stored + executed:
        return stored == executed
    return float(executed) == pytest.approx(float(stored), rel=_TOLERANCE)


def _figures(cell: Any) -> Iterator[dict[str, float]]:
    """Yields the shares of colored and of gray pixels for each figure of a cell."""
    for output in cell.outputs:
        if "image/png" in output.get("data", ()):
            png = io.BytesIO(base64.b64decode(output.data["image/png"]))
            pixels = matplotlib.image.imread(png)[..., :3]
            colored = np.ptp(pixels, axis=-1) > 0.2
            parts = {"color": colored, "gray": ~colored & (pixels.min(axis=-1) < 0.9)}
            yield {paint: float(np.mean(part)) for paint, part in parts.items() if np.any(part)}


def _unified(stored: list[str], executed: list[str]) -> str:
    return "\n".join(difflib.unified_diff(stored, executed, "stored", "now", lineterm=""))
