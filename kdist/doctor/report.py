"""What the doctor says: a line a check, and the command to type next."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"
_WIDTH = 118
_MARGIN = 20


@dataclasses.dataclass(frozen=True)
class Line:
    """What came of one check.

    Args:
        status: "ok", "warn" for what costs time or surprises later, "FAIL" for what cannot work.
        check: What was looked at, in a word or two.
        says: What was found.
        remedy: What to do about it.
        command: The command that does it, where one can be pasted.
    """

    status: str
    check: str
    says: str
    remedy: str = ""
    command: str = ""

    def text(self) -> str:
        """The line as it is printed, with what to do below it."""
        advice = ": ".join(part for part in (self.remedy.rstrip("."), self.command) if part)
        first = textwrap.wrap(
            self.says, _WIDTH - _MARGIN, break_long_words=False, break_on_hyphens=False
        ) or [""]
        # A command stays in one piece, to be pasted.
        below = [f"→ {advice}"] if advice else []
        lines = [
            f"  {self.status:<5} {self.check:<11} {first[0]}",
            *(f"{'':<{_MARGIN}}{t}" for t in first[1:] + below),
        ]
        return "\n".join(lines)


@dataclasses.dataclass
class Report:
    """All lines of one examination.

    Args:
        title: Who was examined.
        lines: What was found.
        joined: Whether the lines speak of all workers; else of one alone.
    """

    title: str = ""
    lines: list[Line] = dataclasses.field(default_factory=list)
    joined: bool = False

    @property
    def failed(self) -> list[Line]:
        """What cannot work."""
        return [line for line in self.lines if line.status == FAIL]

    @property
    def exit_code(self) -> int:
        """0, or 1 if something cannot work."""
        return 1 if self.failed else 0

    def next_command(self, when_well: str, again: str) -> str:
        """Returns what to type next: the remedy of the first failure, where there is one."""
        if not self.failed:
            return when_well
        return next((line.command for line in self.failed if line.command), again)

    def text(self) -> str:
        """The report as it is printed, without its last line."""
        return "\n".join([f"kdist doctor: {self.title}", *(line.text() for line in self.lines)])

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": not self.failed, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what `as_json` gave."""
        said = json.loads(text)
        return cls(said["title"], [Line(**line) for line in said["lines"]], said["joined"])


def names_of(names: Sequence[str], everyone: int) -> str:
    """Says who: "all workers", "worker 1", "worker 0 and 2 more"."""
    if len(names) == everyone:
        return "all workers" if everyone > 1 else names[0]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def spread(values: Iterable[tuple[str, Any]], everyone: int) -> str:
    """Says who has which value: "3.15.1 on worker 0, 3.16.0 on worker 1"."""
    who: dict[str, list[str]] = {}
    for name, value in values:
        who.setdefault(str(value), []).append(name)
    return ", ".join(f"{value} on {names_of(names, everyone)}" for value, names in who.items())
