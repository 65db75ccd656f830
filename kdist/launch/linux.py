"""Process queries and signals for the launcher. Without /proc and prctl, they find fewer processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

_PR_SET_CHILD_SUBREAPER = 36
JOB_VARIABLE = "KDIST_JOB_ID"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process, so that a double fork does not hide them."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def process_table() -> dict[int, tuple[int, str]]:
    """Returns the parent and the state letter ("Z" for a zombie) of each process; empty without /proc."""
    table: dict[int, tuple[int, str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command name is in parentheses, and can itself contain parentheses and spaces.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                table[int(name)] = (int(parent), state.decode())
    return table


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal such as SIGSTOP, and not by a debugger."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
    return False


def descendants(roots: Iterable[int], others: Iterable[int] = ()) -> set[int]:
    """Returns the descendants of the processes `roots`, without the roots themselves and without zombies.

    Also leaves out the processes `others` and their descendants.
    """
    table = process_table()
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        below.setdefault(parent, []).append(pid)
    left_out = set(others)
    found = set(left_out)
    waiting = list(roots)
    while waiting:
        for child in below.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return {pid for pid in found - left_out if table[pid][1] != "Z"}


def members_of_job(job_id: str) -> set[int]:
    """Returns the live processes with the ID of a job in their environment, except this process.

    This also finds processes that left the process tree by a double fork. Only `descendants` finds children
    that were started with an empty environment.
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
    """Collects the zombie children of this process, except the processes in `keep`."""
    kept = set(keep)
    for pid, (parent, state) in process_table().items():
        if parent == os.getpid() and state == "Z" and pid not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def send(pid: int, signum: int, *, group: bool = False) -> None:
    """Sends a signal to a process, or to a process group. Ignores processes that no longer exist."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signum)


def signal_name(signum: int) -> str:
    """Returns the name of a signal, for example "SIGKILL", or "signal 63" if the number has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@contextlib.contextmanager
def caught_signals(handle: Callable[[socket.socket], None]) -> Iterator[socket.socket | None]:
    """Returns a context manager in which a socket receives the numbers of arriving signals in `ENDING`.

    At the end, it calls `handle` for signals that arrived late. Outside the main thread, the socket is `None`,
    because Python allows signal handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        # `nohup` ignores SIGHUP, so that the job continues when the terminal closes.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = [signum for signum in ENDING if signum != signal.SIGHUP or not is_ignored]
        before = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            handle(ours)
