"""What kdist says, and from which level on: the one place where its logger is set up.

It is the logger "kdist" of Python's `logging`. Everything goes to stderr, so that what a script prints stays as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError

VARIABLE = "KDIST_LOG"
NOTICE = 25
"""What a job of several tasks says by itself, between `info` and `warning`: its plan, and for whom it waits."""
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}

logger = logging.getLogger("kdist")


class _Stderr(logging.Handler):
    """Writes to what is stderr by then, unless the program shows messages of all loggers itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # nobody reads any more


def set_up(environ: Mapping[str, str] | None = None) -> None:
    """Sets the level that `KDIST_LOG` says; where it says none, a level of the user's own stands.

    Raises:
        InvalidArgumentError: It is none of "debug", "info", "warning" and "error".

    Example:

    >>> from kdist.cluster import logs
    >>> logs.set_up({"KDIST_LOG": "loud"})
    Traceback (most recent call last):
        ...
    kdist.errors.InvalidArgumentError: `KDIST_LOG` is not one of debug, info, warning, error.
    Received: KDIST_LOG='loud'
    Set one of these levels, for example:
    export KDIST_LOG=debug
    """
    text = environment.get(VARIABLE, environ=environ)
    if text in (None, ""):
        return
    if text.strip().lower() not in _LEVELS:
        raise InvalidArgumentError(
            f"`{VARIABLE}` is not one of {', '.join(_LEVELS)}.",
            received={VARIABLE: text},
            hint=f"Set one of these levels, for example:\nexport {VARIABLE}=debug",
        )
    logger.setLevel(_LEVELS[text.strip().lower()])


def notice(message: str, *values: object) -> None:
    """Says what a job of several tasks says by itself."""
    logger.log(NOTICE, message, *values)


logging.addLevelName(NOTICE, "NOTICE")
logger.addHandler(_Stderr())
logger.handlers[-1].setFormatter(logging.Formatter("kdist: %(message)s"))
if logger.level == logging.NOTSET:
    logger.setLevel(NOTICE)
