"""The end of training, as an evaluator in another process learns of it: a small file beside the checkpoints.

directory/
  .evaluator-0f3a…      an evaluator watches, and wants to be told
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
_SKEW = 5.0  # seconds by which the clock of a file system may be off, if it cannot be read

# When this process has last saved a checkpoint to each folder.
_saved: dict[str, float] = {}
# Seconds by which the clock of the file system of each watched directory is ahead of this process's clock.
_ahead: dict[str, float] = {}


def begin(directories: Iterable[str]) -> None:
    """Removes the sign that an earlier training has left."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(directory, SIGN))


def end(directories: Iterable[str]) -> None:
    """Leaves the sign in folders that are there, all at once: nobody sees half of it."""
    for directory in directories:
        # The folder may have gone, or be full: the evaluator has its time limit.
        with contextlib.suppress(OSError), whole_file(os.path.join(directory, SIGN)):
            pass


@contextlib.contextmanager
def watched(directory: str) -> Iterator[None]:
    """Within this, whoever trains knows that an evaluator watches the folder, unless it cannot be written to."""
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
    """Says whether an evaluator watches a folder, or will: the cluster of `TF_CONFIG` has one."""
    if "evaluator" in parse_tf_config(environment.get("TF_CONFIG")).cluster.jobs:
        return True
    with contextlib.suppress(OSError):
        return any(name.startswith(_WATCHES) for name in os.listdir(directory))
    return False


def has_ended(directory: str) -> bool:
    """Says whether training has left its sign."""
    return os.path.exists(os.path.join(directory, SIGN))


def is_of_now(directory: str) -> bool:
    """Says whether the sign was left while this process ran, and not by an earlier training."""
    began = _process_began_at() + _ahead.get(directory, 0.0)
    try:
        return os.stat(os.path.join(directory, SIGN)).st_mtime >= began - _SKEW
    except OSError:
        return False


@functools.cache
def _process_began_at() -> float:
    """When this process began, in seconds since 1970; where there is no /proc, when it first asked."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time()


def note_saved(directory: str) -> None:
    """Notes that a checkpoint goes to a folder: training goes on."""
    _saved[directory] = time.monotonic()
    begin([directory])


def saved_since(moment: float) -> list[str]:
    """Returns the folders to which checkpoints went since a moment of `time.monotonic()`."""
    return [directory for directory, last in _saved.items() if last >= moment]
