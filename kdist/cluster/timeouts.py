"""The timeouts of the failure detection and of joining, and the exit codes of workers that it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError

HEARTBEAT_VARIABLE = "KDIST_HEARTBEAT_TIMEOUT"
HANG_VARIABLE = "KDIST_HANG_TIMEOUT"
JOIN_VARIABLE = "KDIST_JOIN_TIMEOUT"
RESTART_VARIABLE = "KDIST_RESTART"
# EX_TEMPFAIL in sysexits.h: the worker was preempted and saved a checkpoint, so it can be restarted.
PREEMPTED = 75
# EX_SOFTWARE in sysexits.h: the main thread of the worker hung, so the worker exited.
STALLED = 70

_LEAST_SECONDS = 1.0


def heartbeat_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns the time after which a dead or stopped worker is reported, in seconds (default: 15).

    Raises:
        InvalidArgumentError: If `KDIST_HEARTBEAT_TIMEOUT` is not a number of at least 1.

    Example:

    >>> from kdist.cluster import timeouts
    >>> timeouts.heartbeat_timeout({"KDIST_HEARTBEAT_TIMEOUT": "60"})
    60.0
    """
    return _read(HEARTBEAT_VARIABLE, 15.0, environ)


def hang_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Returns the time after which a hung worker exits while other workers wait for it, in seconds.

    The default is 600, because an upload may take that long.

    Raises:
        InvalidArgumentError: If `KDIST_HANG_TIMEOUT` is not a number of at least 1.
    """
    return _read(HANG_VARIABLE, 600.0, environ)


def engine_timeout() -> float:
    """Returns the default timeout of a collective in the framework, in seconds.

    After its timeout, a framework terminates the process without naming the hung worker. kdist names it, so
    its hang timeout must end first. The factor 2 allows a worker to save or compile in between.
    """
    return max(1800.0, 2 * hang_timeout() + heartbeat_timeout())


def join_timeout() -> float:
    """Returns how long workers wait for each other at startup, in seconds (default: 300).

    Raises:
        InvalidArgumentError: If `KDIST_JOIN_TIMEOUT` is not a number of at least 1.
    """
    return _read(JOIN_VARIABLE, 300.0, None)


def parse_seconds(
    text: object, name: str, example: str = "kdist run --heartbeat-timeout 60 --hang-timeout 900 train.py"
) -> float:
    """Parses a timeout. The error message contains the `name` of the setting and an `example`.

    Raises:
        InvalidArgumentError: If the value is not a number of at least 1.
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
