"""The traces of all workers, put together into one that shows them below each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kdist.whole_files import whole_file

MERGED = "trace.json"
# In the order of their rows.
JOBS = ("worker", "chief", "ps", "evaluator")
_FILE = re.compile(rf"({'|'.join(JOBS)})-(\d+)(?:-(\d+))?\.json")


def file_of(job: str, index: int, start: int) -> str:
    """The name of a task's file; `start` counts the processes that were this task, from 0."""
    return f"{job}-{index}-{start + 1}.json" if start else f"{job}-{index}.json"


def line_of(event: dict[str, Any], first: bool) -> str:
    """Returns an event as it stands in a file. What comes before it has no line break."""
    return ("[\n" if first else ",\n") + json.dumps(event, separators=(",", ":"))


def files_in(folder: str) -> list[str]:
    """Returns the paths of the tasks' traces, in the order of the tasks and of their starts."""
    names = [match for name in os.listdir(folder) if (match := _FILE.fullmatch(name))]
    names.sort(key=lambda match: (JOBS.index(match[1]), int(match[2]), int(match[3] or 0)))
    return [os.path.join(folder, match.string) for match in names]


def read(path: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace that kdist has written.

    The file of a worker that was killed has no end, and perhaps half a line: what is whole is read.
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
    """Writes a trace, which is whole once it has its name."""
    with whole_file(path) as file:
        first = True
        for event in events:
            file.write(line_of(event, first).encode())
            first = False
        file.write(b"[]\n" if first else b"\n]\n")


def merge(folder: str) -> str:
    """Writes the traces of all workers into one file; returns its path.

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
