"""Parses the faults of `kdist run --inject`, which make workers fail on purpose to test fault tolerance."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from kdist.errors import InvalidArgumentError

VARIABLE = "KDIST_INJECT"
KINDS = ("kill", "hang", "freeze", "slow", "exit", "sigterm", "exception")
PHASES = ("begin", "step", "validation", "save", "epoch-end")
# The code that saves a checkpoint defines further phases, such as "save-write".
_PHASE = re.compile(r"(?:begin|step|validation|epoch-end|save(?:-[a-z]+)*)")
_SYNONYMS = {"fit step": "step", "fit-step": "step"}
_OPTIONS = ("worker", "step", "epoch", "phase", "seconds", "always")
_EXAMPLE = (
    "Write the fault as in this example:\nkdist run --num-workers 2 --inject kill:worker=1,step=30 train.py"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the worker and the time at which it happens."""

    kind: str  # one of `KINDS`
    worker: int | None = None  # the index of the worker, or `None` for all workers
    # The number of the training step, from 1. Counts all steps, or the steps of `epoch` if it is set.
    step: int | None = None
    epoch: int | None = None  # from 1
    phase: str = "step"  # one of `PHASES`, or a phase of a save such as "save-write"
    seconds: float = 1.0  # the duration of "slow", in seconds
    always: bool = False  # whether the fault happens again after a restart

    def __str__(self) -> str:
        given = [
            f"{field.name}={_as_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return ":".join([self.kind, ",".join(given)]) if given else self.kind

    def is_at(self, phase: str) -> bool:
        """Returns whether the fault happens in a phase. "save" matches every phase of a save."""
        return phase == self.phase or (self.phase == "save" and phase.startswith("save-"))


def _as_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, (bool, float)) else str(value)


def parse(text: str) -> Fault:
    """Parses a value of `--inject`: `KIND` or `KIND:OPTION=VALUE,...`.

    Raises:
        InvalidArgumentError: If the kind or an option is unknown, or a value is invalid.

    Example:

    >>> from kdist.cluster import injection
    >>> injection.parse("kill:worker=1,step=30")
    Fault(kind='kill', worker=1, step=30, epoch=None, phase='step', seconds=1.0, always=False)
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise InvalidArgumentError(
            f"The fault {kind!r} is not one of {', '.join(KINDS)}.", received={"inject": text}, hint=_EXAMPLE
        )
    options: dict[str, object] = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _OPTIONS or name in options:
            raise InvalidArgumentError(
                f"The option {part!r} of the fault is repeated, or not one of {', '.join(_OPTIONS)}.",
                received={"inject": text, "option": part},
                hint=_EXAMPLE,
            )
        options[name] = _value(text, name, value)
    return Fault(kind, **options)  # type: ignore[arg-type]


def _value(text: str, name: str, value: str) -> object:
    if name == "phase":
        value = _SYNONYMS.get(value, value)
        if _PHASE.fullmatch(value):
            return value
        problem = f"`phase` is not one of {', '.join(PHASES)}, nor a phase of a save such as save-write."
    elif name == "seconds":
        if re.fullmatch(r"\d{1,6}(\.\d{0,6})?", value, re.ASCII):
            return float(value)
        problem = "`seconds` is not a number."
    elif name == "always":
        if value in ("0", "1"):
            return value == "1"
        problem = "`always` is not 0 or 1."
    else:
        least = 0 if name == "worker" else 1
        if re.fullmatch(r"\d{1,9}", value, re.ASCII) and int(value) >= least:
            return int(value)
        problem = f"`{name}` is not an integer of at least {least}."
    raise InvalidArgumentError(problem, received={"inject": text, name: value}, hint=_EXAMPLE)


def join(faults: Iterable[Fault]) -> str:
    """Formats faults as a value of `KDIST_INJECT`."""
    return ";".join(map(str, faults))


def split(text: str | None) -> list[Fault]:
    """Parses the faults in a value of `KDIST_INJECT`."""
    return [parse(part) for part in (text or "").split(";") if part.strip()]
