"""docs/reference/errors.md: every error of kdist, where it is raised, and the exit codes."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict

import kdist.errors
from kdist.cluster import liveness
from kdist.errors import KdistError
from tests.house import FILES, module_of, room_of

_HEAD = """\
# Errors and exit codes

Every error that kdist raises on purpose is a `kdist.errors.KdistError`, and an error of the Python kind in the second
column, which `tf.distribute` raises in its place. Its message states the rule, then what was received, then what to do.
[The API](../api/errors.md) has the classes themselves.

## Errors

| error | is a | when | raised in |
| --- | --- | --- | --- |
"""
_CODES = {
    "0": "all went well",
    "1": "a Python error ended the script; `kdist demo`, `kdist doctor`, `kdist test` and `kdist checkpoint` give it "
    "for a finding",
    "2": "the call was wrong: no such script, an unknown option or backend, or another `KdistError` of a command",
    f"{liveness.STALLED}": "a worker [hung](../failures.md#a-worker-hangs), and has ended itself",
    f"{liveness.PREEMPTED}": "a worker was preempted, has saved, and [wants to be started again](../resuming.md)",
    "128 + n": "signal n ended it: 130 is Ctrl-C, 137 SIGKILL (often for want of memory), 143 SIGTERM",
}
_BEFORE_CODES = """
## Exit codes

An error that ends a script gives exit code 1. `kdist run` passes on the code of the worker that failed first.

| code | meaning |
| --- | --- |"""


def _raised_in() -> dict[str, set[str]]:
    """The rooms in which each error is named beside its definition."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if module_of(path) == "kdist.errors":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name.endswith("Error"):
                rooms[name].add(room_of(path))
    return rooms


def _row(error: type[KdistError], rooms: dict[str, set[str]]) -> str:
    kinds = [base for base in error.__bases__ if not issubclass(base, KdistError)] or error.__bases__
    named = ", ".join(sorted(f"`{room}`" for room in rooms.get(error.__name__, ())))
    when = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return f"| `{error.__name__}` | {', '.join(f'`{kind.__name__}`' for kind in kinds)} | {when} | {named or '–'} |"


def write() -> str:
    """Returns the page."""
    rooms = _raised_in()
    errors = [
        value
        for value in vars(kdist.errors).values()
        if inspect.isclass(value) and issubclass(value, KdistError) and value is not KdistError
    ]
    lines = [_row(error, rooms) for error in errors]
    lines.append(_BEFORE_CODES)
    lines += [f"| {code} | {meaning} |" for code, meaning in _CODES.items()]
    return _HEAD + "\n".join(lines) + "\n"
