"""Writes docs/reference/errors.md: every error of kdist, and the exit codes."""

from __future__ import annotations

import inspect

import kdist.errors
from kdist.cluster import timeouts
from kdist.errors import KdistError

_HEAD = """\
# Errors and exit codes

Look up an error class or an exit code of kdist here. For the message that you see, search
[Troubleshooting](../troubleshooting.md).

All errors that kdist raises on purpose derive from `kdist.errors.KdistError`. Each error also derives from the class in
the second column. Usually this is the exception that `tf.distribute` raises in the same situation, so you can catch
either class. See also [the API](../api/errors.md).

## Errors

| error | also a | raised when |
| --- | --- | --- |
"""
_CODES = {
    "0": "success",
    "1": "the script raised an error, or `kdist demo`, `doctor`, `test` or `checkpoint` found a problem",
    "2": "invalid command: an unknown option or backend, a missing script, or another `KdistError` of a command",
    f"{timeouts.STALLED}": "a worker [hung](../resuming.md#hung-workers) and was terminated",
    f"{timeouts.PREEMPTED}": "a worker was preempted after saving a checkpoint; "
    "[start the job again to resume](../resuming.md)",
    "128 + n": "terminated by signal n: 130 is Ctrl-C, 137 SIGKILL (often out of memory), 143 SIGTERM",
}
_BEFORE_CODES = """
## Exit codes

`kdist run` exits with the code of the worker that failed first.

| code | meaning |
| --- | --- |"""


def _row(error: type[KdistError]) -> str:
    kinds = [base for base in error.__bases__ if not issubclass(base, KdistError)] or error.__bases__
    when = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return f"| `{error.__name__}` | {', '.join(f'`{kind.__name__}`' for kind in kinds)} | {when} |"


def write() -> str:
    """Returns the page."""
    errors = [
        value
        for value in vars(kdist.errors).values()
        if inspect.isclass(value) and issubclass(value, KdistError) and value is not KdistError
    ]
    lines = [_row(error) for error in errors]
    lines.append(_BEFORE_CODES)
    lines += [f"| {code} | {meaning} |" for code, meaning in _CODES.items()]
    return _HEAD + "\n".join(lines) + "\n"
