"""The report of `kdist doctor`: one line per check, and the next command."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"
REPORT_BUG = ("Report this as a bug, with the output of", "kdist info")  # remedy and command
_WIDTH = 118
_MARGIN = 20


@dataclasses.dataclass(frozen=True)
class Line:
    """The result of one check."""

    status: str  # "ok", "warn" if it costs time or causes surprises later, or "FAIL" if the job cannot work
    check: str  # its name, in one or two words
    says: str
    remedy: str = ""
    command: str = ""  # the command for the fix, if there is one to paste

    def text(self) -> str:
        """Returns the printed line, with the advice below it."""
        advice = ": ".join(part for part in (self.remedy.rstrip("."), self.command) if part)
        first = textwrap.wrap(
            self.says, _WIDTH - _MARGIN, break_long_words=False, break_on_hyphens=False
        ) or [""]
        # Do not wrap a command, so that users can paste it.
        below = [f"→ {advice}"] if advice else []
        lines = [
            f"  {self.status:<5} {self.check:<11} {first[0]}",
            *(f"{'':<{_MARGIN}}{t}" for t in first[1:] + below),
        ]
        return "\n".join(lines)


@dataclasses.dataclass
class Report:
    """The results of all checks."""

    title: str = ""  # the workers that were checked
    lines: list[Line] = dataclasses.field(default_factory=list)
    joined: bool = False  # whether the results cover all workers, not only one

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.status == FAIL]

    @property
    def exit_code(self) -> int:
        """0, or 1 if a check failed."""
        return 1 if self.failed else 0

    def next_command(self, when_well: str, again: str) -> str:
        """Returns the next command: the fix for the first failed check that has one, else `again`."""
        if not self.failed:
            return when_well
        return next((line.command for line in self.failed if line.command), again)

    def text(self) -> str:
        """Returns the printed report without its last line."""
        return "\n".join([f"kdist doctor: {self.title}", *(line.text() for line in self.lines)])

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self.failed, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parses the JSON text of a report."""
        said = json.loads(text)
        return cls(said["title"], [Line(**line) for line in said["lines"]], said["joined"])


def names_of(names: Sequence[str], everyone: int) -> str:
    """Joins names, such as "all workers", "worker 1", "worker 0, worker 1 and 2 more"."""
    if len(names) == everyone:
        return "all workers" if everyone > 1 else names[0]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def spread(values: Iterable[tuple[str, Any]], everyone: int) -> str:
    """Groups workers by value, such as "3.15.1 on worker 0, 3.16.0 on worker 1"."""
    who: dict[str, list[str]] = {}
    for name, value in values:
        who.setdefault(str(value), []).append(name)
    return ", ".join(f"{value} on {names_of(names, everyone)}" for value, names in who.items())
