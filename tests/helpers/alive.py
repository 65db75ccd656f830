"""Whether processes have gone. A number alone does not say: the system may have given it to another since."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

Identity = tuple[int, str]  # its number, and when it started, in ticks since the machine did


def identity_of(pid: int) -> Identity:
    """Returns what names a process for good."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return pid, file.read().rpartition(b")")[2].split()[19].decode()


def is_alive(process: Identity) -> bool:
    """Says whether it runs; one that has ended, and that nobody has asked about yet (a zombie), does not."""
    pid, started = process
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and fields[19].decode() == started
    return False


def left_of(processes: Iterable[Identity], within: float = 0.0) -> list[Identity]:
    """Returns those that are still alive, giving them some seconds to end."""
    deadline = time.monotonic() + within
    left = list(processes)
    while left := [process for process in left if is_alive(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    return left
