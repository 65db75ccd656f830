"""Notices that this worker is stuck while others wait for it, and ends it, so that nobody waits forever.

A worker that hangs (a deadlock, a read that never returns) is alive for its engine: heartbeats come from threads
of their own. So each worker looks at its own main thread. One that waits for others says so on the board of its
engine; one that is waited for, and neither moves nor computes, says where it is, and after a time of its own (an
upload may take minutes) it prints its stacks and ends. From there on the others notice its death, as any other. A
worker that is slow, compiles or prepares data uses its processor; one for which nobody waits (between two calls, in a
notebook) may rest as long as it likes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from kdist.backends import activity, frames, whereabouts
from kdist.cluster import liveness
from kdist.errors import WorkerLostError, WorkerTimeoutError

# Shares of the heartbeat timeout: when a worker says that it waits, when one that does not move is suspected, and how
# often both are looked at. The rest is for the others, to notice.
_SAYS_AFTER = 0.2
_SUSPECTS_AFTER = 0.7
_LOOKS = 0.05
_STANDARD_LIBRARY = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
DIED = "it died or is unreachable"
_SOMEBODY = f"another worker: {DIED}"
_PACKAGES = ("site-packages", "dist-packages")
# Whoever stands in a debugger thinks.
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "debugpy", "IPython/core/interactiveshell.py")


class Board(ABC):
    """The interface between a backend and the stall watch: the workers that wait, and their collectives."""

    @abstractmethod
    def say(self, text: str | None) -> None:
        """Publishes where this worker waits for the others; `None` when it continues."""

    @abstractmethod
    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where each one waits."""

    @abstractmethod
    def waits_in(self, filename: str) -> bool:
        """Whether the main thread may be waiting for other workers, given its innermost file outside Python."""

    def farewell(self, text: str) -> None:
        """Sends the reason why this worker ends to the others, if the backend can."""
        return

    def died(self) -> Mapping[int, str]:
        """Returns lost workers and reasons, if the backend does not terminate this worker; see `lost_error`."""
        return {}


class Machine:
    """What the watch reads off this machine, and how it ends the process. Tests have one with a clock of its own."""

    now = staticmethod(time.monotonic)
    others_work = staticmethod(activity.others_work_for_it)

    def cpu_seconds(self) -> float:
        """The processor time of all threads but the calling thread, the watch's: its looks are not work."""
        return time.process_time() - time.thread_time()

    def pause(self, closed: threading.Event, seconds: float) -> bool:
        """Waits until the next look; says whether the watch has been closed."""
        return closed.wait(seconds)

    def end(self, code: int) -> NoReturn:
        """Ends the process."""
        os._exit(code)


class StallWatch:
    """Watches the main thread of this worker, from a thread of its own once it is started."""

    def __init__(
        self, board: Board, names: Sequence[str], worker_index: int, machine: Machine | None = None
    ) -> None:
        self._machine = machine or Machine()
        self._board = board
        self._names = names
        self._index = worker_index
        self._me = names[worker_index]
        self._timeout = liveness.heartbeat_timeout()
        self._suspects_after = self._timeout * _SUSPECTS_AFTER
        self._ends_after = liveness.hang_timeout()
        self._warned: float | None = None  # since when it had been resting
        self._closed = threading.Event()
        self._seen: object = None
        self._since = self._machine.now()
        self._used = self._machine.cpu_seconds()
        self._said = False

    def start(self) -> StallWatch:
        """Begins to watch; returns itself."""
        threading.Thread(target=self.run, name="kdist stall watch", daemon=True).start()
        return self

    def close(self) -> None:
        """Ends the watch: the process is about to end."""
        self._closed.set()

    def run(self) -> None:
        """Watches until it is closed, in this thread."""
        pause = max(0.1, self._timeout * _LOOKS)
        looked = self._machine.now()
        while not self._machine.pause(self._closed, pause):
            if self._machine.now() - looked > self._timeout * _SAYS_AFTER:
                self._seen = None  # this thread could not look, so nobody knows what has moved meanwhile
            looked = self._machine.now()
            stack = frames.frames_of_thread(_watched_thread())
            if not stack:
                continue
            waits = self._board.waits_in(_innermost(stack)) or any(check() for check in _elsewhere)
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
            with contextlib.suppress(Exception):  # the engine's, once its service is gone
                self._board.say(whereabouts.describe_wait() if waits else None)
                self._said = waits

    def _judge(self, resting: float) -> None:
        waiting: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the engine's, if it is gone
            waiting = self._board.read()
        lost = {} if _told else self._board.died()
        if self._closed.is_set() or not (waiting or lost):
            return
        if lost:
            if resting > self._suspects_after:
                self._end(lost_error(self._names, self._index, lost), 1)
            return
        others = ", ".join(f"{self._names[i]} in {where}" for i, where in sorted(waiting.items()))
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
            self._end(error, liveness.STALLED)
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
            if code == liveness.STALLED:
                self._board.farewell(f"it hung at {whereabouts.describe()}")
        self._machine.end(code)


# Who is inside kdist -----------------------------------------------------------------------------------------

calls = 0
"""How often user code has called something that exchanges with other workers."""
_inside: list[int] = []
_elsewhere: list[Callable[[], bool]] = []
_told = False  # an error about a lost worker has been raised to the user, whose turn it is


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Entered for the time of a call into kdist; the thread that called is the one that is watched."""
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
    """Entered by the main thread while it waits for another one, of which `waits` says whether it waits for workers."""
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
    """Whether somebody may be sitting in front of it: at a prompt, or in a debugger."""
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


# What a worker says that has lost another --------------------------------------------------------------------


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
        hint=f"Read the log of {whose or 'each other worker'}, then restart the job.",
    )


def print_stack(said: str = "stack trace of this worker:") -> None:
    """Prints where the main thread is: where no traceback says it."""
    with contextlib.suppress(Exception):
        lines = "".join(frames.stack_lines(_watched_thread()))
        print(f"kdist: {said}\n{lines}", file=sys.stderr, flush=True)
