"""Detects that this worker hangs while others wait for it, and terminates it, so that the job does not hang.

Backends do not notice a hang, such as a deadlock, because heartbeats come from other threads. So each worker
watches its own main thread. If it waits for others, it publishes this on the board of the backend. If others
wait for it and it makes no progress and uses no CPU, it prints a warning with its stack trace. After the hang
timeout (an upload may take minutes), it prints all stack traces and exits. The others then handle a lost
worker. Workers that are slow, compile or prepare data are not affected, because they use the CPU. A worker
can also be idle while no other worker waits for it, for example between two calls in a notebook.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn, Protocol

from kdist.cluster import timeouts
from kdist.control import activity, frames, whereabouts
from kdist.control.loss_reasons import DIED, ENDED, HUNG, REASONS, Loss
from kdist.errors import WorkerLostError, WorkerTimeoutError

# Shares of the heartbeat timeout: until a worker publishes that it waits, until a worker without progress is
# suspected, and between two checks. The rest is for the others, to notice the termination.
_SAYS_AFTER = 0.2
_SUSPECTS_AFTER = 0.7
_LOOKS = 0.05
_STANDARD_LIBRARY = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_SOMEBODY = f"another worker: {REASONS[DIED]}"
_PACKAGES = ("site-packages", "dist-packages")
# A worker in a debugger is not hung: its user is thinking.
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "debugpy", "IPython/core/interactiveshell.py")


class Board(Protocol):
    """The part of a `Channel` that the stall watch uses."""

    names: Sequence[str]
    index: int

    def say(self, text: str | None) -> None:
        """Publishes where this worker waits for the others; `None` when it continues."""

    def waiting(self) -> dict[int, str]:
        """Returns the other workers that wait, and where each one waits."""

    def leave(self, loss: Loss) -> None:
        """Sends the reason why this worker ends to the others."""

    def died(self) -> Mapping[int, str]:
        """Returns lost workers and reasons; see `lost_error`."""


class Machine:
    """The clock, CPU usage and exit of this process. Tests replace it by a fake with its own clock."""

    now = staticmethod(time.monotonic)
    others_work = staticmethod(activity.others_work_for_it)

    def cpu_seconds(self) -> float:
        """Returns the CPU time of all threads except the calling thread, which is the watch."""
        return time.process_time() - time.thread_time()

    def pause(self, closed: threading.Event, seconds: float) -> bool:
        """Waits until the next check, and returns whether the watch was closed."""
        return closed.wait(seconds)

    def end(self, code: int) -> NoReturn:
        """Terminates the process."""
        os._exit(code)


class StallWatch:
    """Watches the main thread of this worker from a background thread.

    Args:
        board: The channel of this worker.
        waits_in: Returns whether the main thread may wait for workers, given its innermost file outside Python.
        machine: The clock and the CPU usage.
    """

    def __init__(self, board: Board, waits_in: Callable[[str], bool], machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._board = board
        self._waits_in = waits_in
        self._me = board.names[board.index]
        self._timeout = timeouts.heartbeat_timeout()
        self._suspects_after = self._timeout * _SUSPECTS_AFTER
        self._ends_after = timeouts.hang_timeout()
        self._warned: float | None = None  # the start of the idle time that was last reported
        self._closed = threading.Event()
        self._seen: object = None
        self._since = self._machine.now()
        self._used = self._machine.cpu_seconds()
        self._said = False

    def start(self) -> StallWatch:
        threading.Thread(target=self.run, name="kdist stall watch", daemon=True).start()
        return self

    def close(self) -> None:
        """Stops the watch, because the process is about to exit."""
        self._closed.set()

    def run(self) -> None:
        """Watches in the calling thread until the watch is closed."""
        pause = max(0.1, self._timeout * _LOOKS)
        looked = self._machine.now()
        while not self._machine.pause(self._closed, pause):
            if self._machine.now() - looked > self._timeout * _SAYS_AFTER:
                self._seen = None  # this thread was blocked and may have missed progress
            looked = self._machine.now()
            stack = frames.frames_of_thread(_watched_thread())
            if not stack:
                continue
            waits = self._waits_in(_innermost(stack)) or any(check() for check in _elsewhere)
            self._note_movement(stack, waits)
            resting = self._machine.now() - self._since
            self._say(waits and resting > self._timeout * _SAYS_AFTER)
            if not waits and resting > min(self._suspects_after, self._ends_after) and not _is_at_rest(stack):
                self._judge(resting)
            del stack  # frames hold the user's arrays

    def _note_movement(self, stack: list[FrameType], waits: bool) -> None:
        now, used = self._machine.now(), self._machine.cpu_seconds()
        seen = (whereabouts.total_steps, calls, waits, tuple((id(f), f.f_lasti) for f in stack))
        moved = seen != self._seen
        if not moved and not waits:
            suspicious = now - self._since > self._timeout * _SAYS_AFTER
            moved = activity.is_busy(used - self._used, now - self._since) or (
                suspicious and self._machine.others_work()
            )
        if moved:
            self._seen, self._since, self._used = seen, now, used

    def _say(self, waits: bool) -> None:
        if waits != self._said:
            self._board.say(whereabouts.describe_wait() if waits else None)
            self._said = waits

    def _judge(self, resting: float) -> None:
        waiting = self._board.waiting()
        lost = {} if _told else self._board.died()
        if self._closed.is_set() or not (waiting or lost):
            return
        if lost:
            if resting > self._suspects_after:
                self._end(lost_error(self._board.names, self._board.index, lost), 1)
            return
        others = ", ".join(f"{self._board.names[i]} in {where}" for i, where in sorted(waiting.items()))
        rests = (
            f"its main thread made no progress and used no CPU for {resting:.0f} s, at {whereabouts.describe()}. "
            f"Other workers wait for it: {others}."
        )
        if resting > self._ends_after:
            error = WorkerTimeoutError(
                f"{self._me} hung: {rests}",
                hint="Find the line that hangs in the stack trace above. If it can take this long, allow more time: "
                "export KDIST_HANG_TIMEOUT=3600",
            )
            self._end(error, timeouts.STALLED)
        elif self._warned != self._since:
            self._warned = self._since
            print_stack(
                f"{self._me} seems to hang: {rests} kdist terminates it after {self._ends_after:.0f} s without "
                "progress. To allow more time, set KDIST_HANG_TIMEOUT. Its stack trace:"
            )

    def _end(self, error: BaseException, code: int) -> NoReturn:
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(Exception):
            lines = "".join(frames.stack_lines(_watched_thread()))
            name = f"{type(error).__module__}.{type(error).__qualname__}"
            print(
                f"Traceback (most recent call last):\n{lines}{name}: {error}", file=sys.__stderr__, flush=True
            )
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if code == timeouts.STALLED:
                self._board.leave(Loss(HUNG, f"it hung at {whereabouts.describe()}"))
        self._machine.end(code)


# Calls into kdist -------------------------------------------------------------------------------------------

calls = 0
"""The number of calls from user code into kdist that exchange data with other workers."""
_inside: list[int] = []
_elsewhere: list[Callable[[], bool]] = []
_told = False  # an error about a lost worker was raised, so that user code can handle it


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """A context manager for a call into kdist. The stall watch watches the calling thread."""
    global calls
    calls += 1
    thread = threading.get_ident()
    _inside.append(thread)
    try:
        yield
    finally:
        _inside.remove(thread)


@contextlib.contextmanager
def waiting_for_thread(waits: Callable[[], bool]) -> Iterator[None]:
    """Enter this to wait for another thread. `waits` returns whether that thread waits for workers."""
    _elsewhere.append(waits)
    try:
        yield
    finally:
        _elsewhere.remove(waits)


def _watched_thread() -> int:
    with contextlib.suppress(IndexError):
        return _inside[0]
    return threading.main_thread().ident or 0


def _is_at_rest(stack: list[FrameType]) -> bool:
    """Returns whether a user may be at an interactive prompt or in a debugger."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive) or _in_notebook()
    if interactive and not _inside:
        return True
    return any(f.f_code.co_filename.endswith(_DEBUGGERS) for f in stack) and not _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell, "get_ipython", lambda: None)() is not None


def _innermost(stack: list[FrameType]) -> str:
    for frame in stack:
        name = frame.f_code.co_filename
        if not name.startswith(("<frozen", *_STANDARD_LIBRARY)) or any(p in name for p in _PACKAGES):
            return name
    return ""


# Lost workers -----------------------------------------------------------------------------------------------


def lost_error(
    names: Sequence[str], worker_index: int, lost: Mapping[int, str], error: BaseException | str | None = None
) -> WorkerLostError:
    """Returns the error of a worker that has lost others.

    `lost` contains a reason per lost worker, such as {3: "it died"}. It is empty if the reason is unknown.
    `error` is the error of the backend.
    """
    global _told
    _told = True
    said = {names[index]: what.rstrip(".") for index, what in sorted(lost.items())}
    named = "; ".join(f"{name}: {what}" for name, what in said.items()) or _SOMEBODY
    them, whose = "them" if len(lost) > 1 else "it", ", ".join(said)
    received = {"this_worker": names[worker_index]}
    if error is not None and str(error):
        received["error"] = str(error).splitlines()[0][:200]
    return WorkerLostError(
        f"The job lost {named}. This worker needs {them} for {whereabouts.describe_wait()}.",
        received=received,
        hint=f"Read the log of {whose}. If there is no error, call each method the same number of times on all workers."
        if lost and all(reason == REASONS[ENDED] for reason in lost.values())
        else f"Read the log of {whose or 'each other worker'}, then restart the job.",
    )


def print_stack(said: str = "stack trace of this worker:") -> None:
    """Prints the stack of the watched thread, if no traceback shows it."""
    with contextlib.suppress(Exception):
        lines = "".join(frames.stack_lines(_watched_thread()))
        print(f"kdist: {said}\n{lines}", file=sys.stderr, flush=True)
