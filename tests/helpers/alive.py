"""Finds out whether processes have ended. A process id is not enough, because the system reuses the ids."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

Identity = tuple[int, str]  # the process id, and the start time in clock ticks since boot


def identity_of(pid: int) -> Identity:
    """Returns an identity that no other process will have."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return pid, file.read().rpartition(b")")[2].split()[19].decode()


def is_alive(process: Identity) -> bool:
    """Returns whether the process still runs; a zombie does not."""
    pid, started = process
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and fields[19].decode() == started
    return False


def left_of(processes: Iterable[Identity], within: float = 0.0) -> list[Identity]:
    """Waits up to some seconds for processes to end, and returns the processes that are still alive."""
    deadline = time.monotonic() + within
    left = list(processes)
    while left := [process for process in left if is_alive(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    return left
