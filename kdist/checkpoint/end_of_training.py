"""Notifies an evaluator in another process of the end of training, by a file next to the checkpoints.

directory/
  .evaluator-0f3a…      an evaluator watches this directory
  .training-ended       training has ended
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterable, Iterator

from kdist.cluster import environment
from kdist.cluster.tf_config import parse_tf_config
from kdist.whole_files import whole_file

SIGN = ".training-ended"
_WATCHES = ".evaluator-"
_SKEW = 5.0  # tolerated error of a file system's clock, in seconds

# The time (`time.monotonic()`) at which this process last saved to each directory.
_saved: dict[str, float] = {}
# How many seconds the file system's clock is ahead of this process's clock, for each watched directory.
_ahead: dict[str, float] = {}


def begin(directories: Iterable[str]) -> None:
    """Removes the end file of an earlier training."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(directory, SIGN))


def end(directories: Iterable[str]) -> None:
    """Writes the end file to each directory atomically."""
    for directory in directories:
        # Ignore a missing directory or a full disk, because the evaluator also has a timeout.
        with contextlib.suppress(OSError), whole_file(os.path.join(directory, SIGN)):
            pass


@contextlib.contextmanager
def watched(directory: str) -> Iterator[None]:
    """Marks a directory as watched by an evaluator within this context, if it is writable."""
    mine = os.path.join(directory, f"{_WATCHES}{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)
        with open(mine, "x", encoding="utf-8"):
            _ahead[directory] = os.stat(mine).st_mtime - time.time()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(mine)


def is_wanted(directory: str) -> bool:
    """Returns whether an evaluator watches the directory, or will do so because `TF_CONFIG` contains one."""
    if "evaluator" in parse_tf_config(environment.get("TF_CONFIG")).cluster.jobs:
        return True
    with contextlib.suppress(OSError):
        return any(name.startswith(_WATCHES) for name in os.listdir(directory))
    return False


def has_ended(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, SIGN))


def is_of_now(directory: str) -> bool:
    """Returns whether the end file was written after this process started, not by an earlier training."""
    began = _process_began_at() + _ahead.get(directory, 0.0)
    try:
        return os.stat(os.path.join(directory, SIGN)).st_mtime >= began - _SKEW
    except OSError:
        return False


@functools.cache
def _process_began_at() -> float:
    """Returns when this process started (without /proc: the time of the first call), in Unix time."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time()


def note_saved(directory: str) -> None:
    """Records a save to a directory, and removes its end file because training continues."""
    _saved[directory] = time.monotonic()
    begin([directory])


def saved_since(moment: float) -> list[str]:
    """Returns the directories with saves since `moment`, a value of `time.monotonic()`."""
    return [directory for directory, last in _saved.items() if last >= moment]
