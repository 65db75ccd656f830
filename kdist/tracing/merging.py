"""Merges the traces of all workers into one trace."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kdist.whole_files import whole_file

MERGED = "trace.json"
# In the order of the rows in the merged trace.
JOBS = ("worker", "chief", "ps", "evaluator")
_FILE = re.compile(rf"({'|'.join(JOBS)})-(\d+)(?:-(\d+))?\.json")


def file_of(job: str, index: int, start: int) -> str:
    """Returns the file name of a task. `start` counts the starts of this task, from 0."""
    return f"{job}-{index}-{start + 1}.json" if start else f"{job}-{index}.json"


def line_of(event: dict[str, Any], first: bool) -> str:
    """Returns the text of an event in a file, including the line break before it."""
    return ("[\n" if first else ",\n") + json.dumps(event, separators=(",", ":"))


def files_in(folder: str) -> list[str]:
    """Returns the paths of the traces, sorted by job, task index and start."""
    names = [match for name in os.listdir(folder) if (match := _FILE.fullmatch(name))]
    names.sort(key=lambda match: (JOBS.index(match[1]), int(match[2]), int(match[3] or 0)))
    return [os.path.join(folder, match.string) for match in names]


def read(path: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace that kdist has written.

    Skips incomplete lines. The file of a killed worker has no end, and may stop in the middle of a line.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text in ("", "[", "]"):
                continue
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def read_all(folder: str) -> Iterator[dict[str, Any]]:
    """Yields the events of all workers."""
    for path in files_in(folder):
        yield from read(path)


def write(path: str, events: Iterable[dict[str, Any]]) -> None:
    """Writes a trace. The file appears under its name when it is complete."""
    with whole_file(path) as file:
        first = True
        for event in events:
            file.write(line_of(event, first).encode())
            first = False
        file.write(b"[]\n" if first else b"\n]\n")


def merge(folder: str) -> str:
    """Merges the traces of all workers into one file, and returns its path.

    Example:

    >>> import tempfile
    >>> from kdist.tracing import merging
    >>> folder = tempfile.mkdtemp()
    >>> merging.merge(folder).removeprefix(folder)
    '/trace.json'
    """
    path = os.path.join(folder, MERGED)
    write(path, read_all(folder))
    return path
