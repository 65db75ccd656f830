"""Finds the tests that pass without a scope but not in a scope, and compares them with the known failures."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

BEGUN = "begun"


class Outcome(NamedTuple):
    """How a test ended, the last line of its error, and how long it took."""

    outcome: str
    line: str = ""
    seconds: float = 0.0


class Known(NamedTuple):
    """A known failure, and the reason why it is not fixed."""

    backend: str
    test: str
    reason: str


@dataclasses.dataclass
class Comparison:
    """One backend's tests, without and with a scope.

    Attributes:
        lost: The tests that pass only without a scope, with their outcomes in the scope.
        new: The lost tests that are not known.
        fixed: The known failures that now pass in a scope.
        gone: The known failures that do not pass without a scope: removed or skipped tests, for example.
    """

    backend: str
    plain: Mapping[str, Outcome]
    scoped: Mapping[str, Outcome]
    known: Mapping[str, Known]

    def __post_init__(self) -> None:
        passed = [test for test, outcome in self.plain.items() if outcome.outcome == "passed"]
        after = {test: self.scoped.get(test, Outcome("not collected")) for test in passed}
        self.lost = {test: outcome for test, outcome in after.items() if outcome.outcome != "passed"}
        self.new = {test: outcome for test, outcome in self.lost.items() if test not in self.known}
        self.fixed = [test for test in self.known if test in after and test not in self.lost]
        self.gone = [test for test in self.known if test not in after]

    def row(self) -> tuple[str, ...]:
        """Returns the backend's row of the table."""
        counts = Counter(outcome.outcome for outcome in self.plain.values())
        other = len(self.plain) - counts["passed"] - counts["skipped"]
        minutes = [sum(o.seconds for o in run.values()) / 60 for run in (self.plain, self.scoped)]
        numbers = (counts["passed"], counts["skipped"], other, len(self.lost), len(self.new))
        return (self.backend, *map(str, numbers), *(f"{each:.1f}" for each in minutes))


def read_results(path: Path) -> dict[str, Outcome]:
    """Returns the outcome of each test in a results file. A test that began but did not end has `BEGUN`."""
    outcomes = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            outcomes[entry["test"]] = Outcome(entry["outcome"], entry["line"], entry["seconds"])
    return outcomes


def read_known(text: str) -> list[Known]:
    """Reads the known failures: a line with a reason, then an indented line for each backend and test."""
    reason, known = "", []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            reason = line.strip()
            continue
        backend, _, test = line.strip().partition(" ")
        if not reason or not test:
            raise ValueError(
                f"Line {number} must be `    backend test`, below a line with a reason: {line!r}"
            )
        known.append(Known(backend, test, reason))
    return known


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Returns the rows in columns, with a header."""
    heads = ("backend", "passed", "skipped", "failed", "lost in scope", "new", "min plain", "min scope")
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def report(comparisons: Iterable[Comparison]) -> str:
    """Returns the table, then the names of new failures, known failures, and known failures that pass."""
    comparisons = list(comparisons)
    parts = [table(comparison.row() for comparison in comparisons)]
    for each in comparisons:
        absent = {test: o for test, o in each.plain.items() if o.outcome == "not collected"}
        old = {test: outcome for test, outcome in each.lost.items() if test in each.known}
        named = {
            "new": each.new,
            "known": old,
            "not collected": absent,
            "known, but passes now: take it off the list": dict.fromkeys(each.fixed),
            "known, but does not pass plainly": dict.fromkeys(each.gone),
        }
        for title, tests in named.items():
            if tests:
                parts.append(f"\n{each.backend}, {title} ({len(tests)}):")
                parts += [f"  {test}" + _said(outcome) for test, outcome in sorted(tests.items())]
    return "\n".join(parts)


def _said(outcome: Outcome | None) -> str:
    return f"\n      {outcome.outcome}: {outcome.line[:200]}" if outcome else ""
