"""Detects processes, threads, listening ports and environment variables that a test leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Iterator

from kdist.launch.linux import descendants


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The resources of this process at one moment."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    ports: frozenset[int]
    environment: dict[str, str]


def snapshot() -> Snapshot:
    """Records the descendants of this process, its threads, its listening ports and its environment.

    Returns:
        A `Snapshot` for `check`.
    """
    return Snapshot(
        processes=frozenset(descendants([os.getpid()])),
        threads=frozenset(threading.enumerate()),
        ports=frozenset(_listening_ports()),
        environment=dict(os.environ),
    )


def check(
    before: Snapshot, settle: float = 2.0, ignore_threads: str = r"$^", ignore_variables: str = r"PYTEST_"
) -> None:
    """Checks that a test has left no process, thread, listening port or changed variable behind.

    Args:
        before: The result of `snapshot()`.
        settle: Seconds that processes, threads and ports may take to end.
        ignore_threads: A pattern for the names of threads that may stay.
        ignore_variables: A pattern for the names of environment variables that may change.

    Raises:
        AssertionError: If anything is left; the message lists it.

    Example:

    >>> from kdist.testing import check, snapshot
    >>> before = snapshot()
    >>> check(before)
    """
    deadline = time.monotonic() + settle
    while True:
        left = _differences(before, ignore_threads, ignore_variables)
        if not left:
            return
        if time.monotonic() >= deadline:
            raise AssertionError(
                "The test left resources behind. Close or terminate them:\n"
                + "\n".join(f"  {line}" for line in left)
            )
        time.sleep(0.05)


@contextlib.contextmanager
def no_leaks(
    settle: float = 2.0, ignore_threads: str = r"$^", ignore_variables: str = r"PYTEST_"
) -> Iterator[None]:
    """Checks that a `with` block leaves nothing behind; see `check`.

    Args:
        settle: Seconds that processes, threads and ports may take to end.
        ignore_threads: A pattern for the names of threads that may stay.
        ignore_variables: A pattern for the names of environment variables that may change.

    Raises:
        AssertionError: If anything is left. If the block itself fails, its error is raised instead.
    """
    before = snapshot()
    yield
    check(before, settle, ignore_threads, ignore_variables)


def _differences(before: Snapshot, ignore_threads: str, ignore_variables: str) -> list[str]:
    now = snapshot()
    lines = [f"process {pid}: {_command_of(pid)}" for pid in sorted(now.processes - before.processes)]
    for thread in now.threads - before.threads:
        if thread.is_alive() and not re.match(ignore_threads, thread.name):
            lines.append(f"thread {thread.name!r}")
    lines += [f"listening port {port}" for port in sorted(now.ports - before.ports)]
    for name in sorted(set(before.environment) | set(now.environment)):
        old, new = before.environment.get(name), now.environment.get(name)
        if old != new and not re.match(ignore_variables, name):
            lines.append(f"environment variable {name}: changed from {old!r} to {new!r}")
    return lines


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    except OSError:
        return "(gone)"


def _listening_ports() -> set[int]:
    """Returns the ports at which this process listens, from the system's table and its open sockets."""
    own: set[str] = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}"))
                if match:
                    own.add(match.group(1))
    ports: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in own:  # 0A is the state LISTEN
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
