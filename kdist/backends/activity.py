"""Whether a process whose main thread stands still works nevertheless: in other threads, in children, on a disk."""

from __future__ import annotations

import contextlib
import glob
import os

# Idle threads (heartbeats, pollers) use less than this share of a core, work uses more.
_SHARE = 0.03
_LEAST_SECONDS = 1.0

_children_used = 0.0


def is_busy(used: float, elapsed: float) -> bool:
    """Says whether a process computes that has used so much processor time."""
    return used > _SHARE * max(elapsed, _LEAST_SECONDS)


def others_work_for_it() -> bool:
    """Says whether a thread of this process waits for a disk, or a child has computed since the last call.

    Known on Linux only; elsewhere it says no.
    """
    global _children_used
    before, _children_used = _children_used, sum(_seconds_of(pid) for pid in _descendants(os.getpid()))
    return _children_used - before > _SHARE * 0.5 or _waits_for_disk()


def is_stopped(pid: int) -> bool:
    """Says whether a process of this machine stands still because of a signal such as SIGSTOP."""
    return _stat(f"/proc/{pid}/stat")[:1] == ["T"]


def _waits_for_disk() -> bool:
    return any(_stat(path)[:1] == ["D"] for path in glob.glob("/proc/self/task/*/stat"))


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
    """The fields after the command's name, which may hold anything; the state is the first."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    return []
