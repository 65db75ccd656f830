"""How long a worker may be silent, and the exit codes by which workers and the launcher understand each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError

HEARTBEAT_VARIABLE = "KDIST_HEARTBEAT_TIMEOUT"
RESTART_VARIABLE = "KDIST_RESTART"
# What sysexits.h calls EX_TEMPFAIL: the worker was preempted, its checkpoint is saved, start it again.
PREEMPTED = 75
# EX_SOFTWARE: the worker's main thread did not move any more, and the worker has ended itself.
STALLED = 70

_DEFAULT_SECONDS = 15.0
_LEAST_SECONDS = 1.0


def heartbeat_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns after how many seconds a worker that is dead or stuck must have been noticed.

    Args:
        environ: The environment to read; by default the process's own.

    Returns:
        The value of `KDIST_HEARTBEAT_TIMEOUT`, else 15.

    Raises:
        InvalidArgumentError: If it is no number of at least 1.

    Example:

    >>> from kdist.cluster import liveness
    >>> liveness.heartbeat_timeout({"KDIST_HEARTBEAT_TIMEOUT": "60"})
    60.0
    """
    text = environment.get(HEARTBEAT_VARIABLE, environ=environ)
    return _DEFAULT_SECONDS if text in (None, "") else parse_heartbeat_timeout(text, HEARTBEAT_VARIABLE)


def parse_heartbeat_timeout(text: object, name: str) -> float:
    """Checks a heartbeat timeout; `name` is what the user has set.

    Raises:
        InvalidArgumentError: If it is no number of at least 1.
    """
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = math.nan
    if not _LEAST_SECONDS <= seconds < math.inf:
        raise InvalidArgumentError(
            "The heartbeat timeout must be a number of seconds, at least 1.",
            received={name: text},
            hint="For example: kdist run --heartbeat-timeout 60 train.py",
        )
    return seconds
