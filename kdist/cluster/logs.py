"""Sets up the logger of kdist and its level.

This is the logger "kdist" of Python's `logging`. It writes to stderr, so the script's stdout is unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError

VARIABLE = "KDIST_LOG"
NOTICE = 25
"""The default level, between `info` and `warning`: the plan of a job and the workers it waits for."""
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}

logger = logging.getLogger("kdist")


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, unless the root logger has handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # stderr is closed


def set_up(environ: Mapping[str, str] | None = None) -> None:
    """Sets the log level from `KDIST_LOG`. If it is not set, keeps the current level.

    Raises:
        InvalidArgumentError: If the value is not "debug", "info", "warning" or "error".

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


@contextlib.contextmanager
def keeping_root_handlers() -> Iterator[None]:
    """A context that removes handlers that a library adds to the root logger. They would change kdist's messages."""
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = before


def notice(message: str, *values: object) -> None:
    """Logs a message at the level `NOTICE`."""
    logger.log(NOTICE, message, *values)


logging.addLevelName(NOTICE, "NOTICE")
logger.addHandler(_Stderr())
logger.handlers[-1].setFormatter(logging.Formatter("kdist: %(message)s"))
if logger.level == logging.NOTSET:
    logger.setLevel(NOTICE)
