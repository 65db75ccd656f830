"""How long a worker may be silent, and the exit codes by which workers and the launcher understand each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError

HEARTBEAT_VARIABLE = "KDIST_HEARTBEAT_TIMEOUT"
HANG_VARIABLE = "KDIST_HANG_TIMEOUT"
JOIN_VARIABLE = "KDIST_JOIN_TIMEOUT"
RESTART_VARIABLE = "KDIST_RESTART"
# What sysexits.h calls EX_TEMPFAIL: the worker was preempted, its checkpoint is saved, start it again.
PREEMPTED = 75
# EX_SOFTWARE: the worker's main thread did not move any more, and the worker has ended itself.
STALLED = 70

_LEAST_SECONDS = 1.0


def heartbeat_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns after how many seconds a worker that is dead or stopped must have been noticed; by default 15.

    Raises:
        InvalidArgumentError: If `KDIST_HEARTBEAT_TIMEOUT` is no number of at least 1.

    Example:

    >>> from kdist.cluster import liveness
    >>> liveness.heartbeat_timeout({"KDIST_HEARTBEAT_TIMEOUT": "60"})
    60.0
    """
    return _read(HEARTBEAT_VARIABLE, 15.0, environ)


def hang_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns after how many seconds a worker ends that stands still while others wait for it.

    By default it is 600: an upload may take that long.

    Raises:
        InvalidArgumentError: If `KDIST_HANG_TIMEOUT` is no number of at least 1.
    """
    return _read(HANG_VARIABLE, 600.0, environ)


def engine_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns how many seconds a collective of the engine may wait, where the user sets no limit.

    An engine that runs out of time ends the process without a word about the worker that hangs. So kdist, which says
    which worker hangs and where, comes first. A worker that saves or compiles meanwhile gets as much time again.
    """
    return max(1800.0, 2 * hang_timeout(environ) + heartbeat_timeout(environ))


def join_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns how many seconds the workers wait for each other at the start.

    Args:
        environ: The environment to read; by default the process's own.

    Returns:
        The value of `KDIST_JOIN_TIMEOUT`, else 300.

    Raises:
        InvalidArgumentError: If it is no number of at least 1.
    """
    return _read(JOIN_VARIABLE, 300.0, environ)


def parse_seconds(
    text: object, name: str, example: str = "kdist run --heartbeat-timeout 60 --hang-timeout 900 train.py"
) -> float:
    """Checks one of these timeouts; `name` is what the user has set, and an example how to.

    Raises:
        InvalidArgumentError: If it is no number of at least 1.
    """
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = math.nan
    if not _LEAST_SECONDS <= seconds < math.inf:
        raise InvalidArgumentError(
            f"`{name}` is not a number of seconds of at least 1.",
            received={name: text},
            hint=f"Set the timeout in seconds, for example:\n{example}",
        )
    return seconds


def _read(name: str, default: float, environ: Mapping[str, str] | None) -> float:
    text = environment.get(name, environ=environ)
    return default if text in (None, "") else parse_seconds(text, name, f"export {name}={default:g}")
