"""Detects work of a process with an idle main thread: in other threads, in child processes or on a disk."""

from __future__ import annotations

import contextlib
import glob
import os

# Idle threads, such as heartbeats and pollers, use less than this share of a core. Busy threads use more.
_SHARE = 0.03
_LEAST_SECONDS = 1.0

_children_used = 0.0


def is_busy(used: float, elapsed: float) -> bool:
    """Returns whether a process that used `used` seconds of CPU in `elapsed` seconds is computing."""
    return used > _SHARE * max(elapsed, _LEAST_SECONDS)


def others_work_for_it() -> bool:
    """Returns whether a thread waits for a disk, or a child process has used the CPU since the last call.

    Works only on Linux. On other systems, it returns `False`.
    """
    global _children_used
    before, _children_used = _children_used, sum(_seconds_of(pid) for pid in _descendants(os.getpid()))
    waits_for_disk = any(_stat(path)[:1] == ["D"] for path in glob.glob("/proc/self/task/*/stat"))
    return waits_for_disk or _children_used - before > _SHARE * 0.5


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this machine is suspended by a signal such as SIGSTOP."""
    return _stat(f"/proc/{pid}/stat")[:1] == ["T"]


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for path in glob.glob(f"/proc/{waiting.pop()}/task/*/children"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                new = {int(number) for number in file.read().split()} - found
                found |= new
                waiting += new
    return found


def _seconds_of(pid: int) -> float:
    fields = _stat(f"/proc/{pid}/stat")
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if len(fields) > 14 else 0.0


def _stat(path: str) -> list[str]:
    """Returns the fields after the command name, which can contain any character. The first is the state."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    return []
