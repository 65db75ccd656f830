"""What the launcher asks the system about processes. Elsewhere than on Linux it does what it can."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36
JOB_VARIABLE = "KDIST_JOB_ID"


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process, so that none escapes by a double fork."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def process_table() -> dict[int, tuple[int, str]]:
    """Returns the parent and the state letter ("Z" is a zombie) of every process there is; nothing without /proc."""
    table: dict[int, tuple[int, str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command's name stands in brackets and may itself hold brackets and blanks.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                table[int(name)] = (int(parent), state.decode())
    return table


def is_stopped(pid: int) -> bool:
    """Says whether a process stands still because of a signal such as SIGSTOP."""
    return process_table().get(pid, (0, ""))[1] in ("T", "t")


def descendants(roots: Iterable[int]) -> set[int]:
    """Returns the processes below `roots`, without the roots themselves, zombies left out."""
    table = process_table()
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in below.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return {pid for pid in found if table[pid][1] != "Z"}


def members_of_job(job_id: str) -> set[int]:
    """Returns the live processes that were started with a job's number in their environment, without this one.

    It finds those that left the process tree (a double fork); children that were started with an emptied
    environment are found by `descendants` only.
    """
    marker = f"{JOB_VARIABLE}={job_id}".encode()
    found: set[int] = set()
    for pid, (_, state) in process_table().items():
        if state == "Z" or pid == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if marker in file.read().split(b"\0"):
                found.add(pid)
    return found


def reap_orphans(keep: Iterable[int]) -> None:
    """Collects dead children that this process has inherited, but for those that somebody else waits for."""
    kept = set(keep)
    for pid, (parent, state) in process_table().items():
        if parent == os.getpid() and state == "Z" and pid not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def send(pid: int, signum: int, *, group: bool = False) -> None:
    """Sends a signal, to a whole group if asked; a process that has gone already is none of our business."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signum)


def signal_name(signum: int) -> str:
    """Returns a signal's name, such as "SIGKILL"; "signal 63" for a number without one."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
