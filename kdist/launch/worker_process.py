"""Starts a worker process, and handles its output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from kdist.cluster import timeouts
from kdist.launch import linux
from kdist.launch.output import LineStream, Sink, Tail
from kdist.launch.plan import WorkerPlan

# A worker that exits as preempted so often in a row, and so soon after its start, may do so at each start. Then its
# restarts count, so that they have an end.
_MOST_EARLY = 3
_EARLY = 60.0  # seconds
_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_start.py")


def start_command(command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` (with an absolute path) and is killed if this process dies."""
    return [sys.executable, "-I", "-S", _START, str(os.getpid()), *command]


class Restarts:
    """Counts the restarts of a job or of one worker, except those after a preemption."""

    def __init__(self) -> None:
        self._counted = 0
        self._times_early = 0  # in a row, when the worker was preempted

    def is_free(self, worker: WorkerProcess) -> bool:
        """Returns whether a restart after the exit of this worker does not count. Call it once per exit."""
        is_preempted = worker.exit_code == timeouts.PREEMPTED
        is_early = is_preempted and worker.exited_at - worker.started_at < _EARLY
        self._times_early = self._times_early + 1 if is_early else 0
        return is_preempted and self._times_early <= _MOST_EARLY

    def count(self, most: int) -> str | None:
        """Counts a restart. Returns its number as text, or `None` if no restart is left."""
        if self._counted >= most:
            return None
        self._counted += 1
        return f"restart {self._counted} of {most}"


@dataclasses.dataclass(eq=False)
class WorkerProcess:
    """A worker process, and its output. Call `start` to start it."""

    plan: WorkerPlan
    command: Sequence[str]
    out: Sink
    err: Sink
    prefix: str = ""  # before each line of output
    log_file: str | None = None  # for a copy of its output, with only the last state of progress bars
    append: bool = False  # to the log file, for example after a restart
    keep_stdin: bool = False  # the worker inherits the launcher's stdin

    def __post_init__(self) -> None:
        self.name = self.plan.name
        self.tail = Tail()
        # The destinations of stdout and stderr, by file descriptor.
        self.channels: dict[int, tuple[list[LineStream], Tail | None]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None
        self.exit_code: int | None = None
        self.started_at = self.exited_at = 0.0
        self.frozen = False  # stopped by a signal (SIGSTOP), and therefore killed
        self.times_stopped = 0  # in a row, when the launcher looked
        self.starting = False  # about to restart
        self.dismissed = False  # may exit now
        self.restarts = Restarts()
        self._times_restarted = 0
        self._log: IO[str] | None = None

    @property
    def pid(self) -> int:
        """The process ID, which is also the ID of the worker's process group."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has started and has not exited."""
        return self.process is not None and self.exit_code is None

    def start(self) -> None:
        """Starts the process in a new session, so that its children can be killed together with it."""
        self.started_at = time.monotonic()
        logs: list[Sink] = []
        if self.log_file:
            with self._reporting_log_errors():
                os.makedirs(os.path.dirname(self.log_file), exist_ok=True)  # may be deleted before a restart
                mode = "a" if self.append else "w"
                self._log = open(self.log_file, mode, encoding="utf-8")  # noqa: SIM115  # closed with the worker
                logs = [Sink(self._log)]
        eager = (self.plan.index == 0 and not self.plan.helps) or not self.prefix
        out_read, out_write = self._open_stdout(eager)
        err_read, err_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                start_command(self.command),
                env=self.plan.environ,
                stdin=None if self.keep_stdin else subprocess.DEVNULL,
                stdout=out_write,
                stderr=err_write,
                start_new_session=True,
            )
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        for fd, sink, tail in ((out_read, self.out, None), (err_read, self.err, self.tail)):
            shown = LineStream(sink, self.prefix or None, eager)
            self.channels[fd] = [shown, *(LineStream(log, "") for log in logs)], tail
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def is_here(self) -> bool:
        """Whether the process runs or is about to restart."""
        return self.alive or self.starting

    def send(self, signum: int) -> None:
        """Sends a signal to the process and its children, if it runs."""
        if self.alive:
            linux.send(self.pid, signum, group=True)

    def kill_if_stopped(self, times: int) -> None:
        """Kills a process that a signal has stopped at this and the last calls. Other machines only notice its end."""
        is_frozen = self.alive and linux.is_stopped(self.pid)
        self.times_stopped = self.times_stopped + 1 if is_frozen else 0
        if self.times_stopped == times:
            self.frozen = True
            self.send(signal.SIGKILL)

    def restart(self, told: Mapping[str, str]) -> None:
        """Restarts the process after its exit, with additional variables. Appends to its log file."""
        self.close()
        self._times_restarted += 1
        environ = {**self.plan.environ, **told, timeouts.RESTART_VARIABLE: str(self._times_restarted)}
        self.plan = dataclasses.replace(self.plan, environ=environ)
        self.exit_code, self.tail, self.append = None, Tail(), True
        self.frozen, self.times_stopped = False, 0
        self.start()

    def _open_stdout(self, eager: bool) -> tuple[int, int]:
        # Keras redraws its progress bar only if stdout is a terminal. Otherwise it prints one line per step.
        if eager and self.out.is_terminal:
            with contextlib.suppress(OSError, ImportError):
                return _open_terminal(len(self.prefix))
        return os.pipe()

    def lines(self) -> list[LineStream]:
        """Returns all destinations of the output."""
        return [line for lines, _ in self.channels.values() for line in lines]

    def read(self, fd: int) -> bool:
        """Reads output from one of the streams. Returns `False` at the end of the stream."""
        try:
            data = os.read(fd, 65536)
        except OSError:  # a terminal whose other end is closed
            data = b""
        lines, tail = self.channels[fd]
        if not data:
            for line in lines:
                line.close()
            del self.channels[fd]
            os.close(fd)
            return False
        if tail is not None:
            tail.feed(data)
        for line in lines:
            line.feed(data)
        return True

    def collect(self) -> bool:
        """Sets the exit code if the process has exited. Returns whether it has exited since the last call."""
        if not self.alive or self.process is None or self.process.poll() is None:
            return False
        self.exit_code = self.process.returncode
        self.exited_at = time.monotonic()
        return True

    def close(self) -> None:
        """Closes all open files. Call it after the process has exited."""
        for line in self.lines():
            line.close()
        for fd in self.channels:
            os.close(fd)
        self.channels.clear()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self._log is not None:
            with self._reporting_log_errors():
                self._log.close()  # writes the rest, which fails if the disk is full
            self._log = None

    @contextlib.contextmanager
    def _reporting_log_errors(self) -> Iterator[None]:
        """Reports an error of the log file, for example a full disk, which must not end the job."""
        try:
            yield
        except OSError as error:
            self.err.say(f"kdist: the log {self.log_file} is incomplete: {error.strerror}.")


def _open_terminal(margin: int) -> tuple[int, int]:
    """Opens a raw pseudo-terminal that is narrower than the real terminal by `margin` columns."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    settings: list[Any] = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # otherwise every newline becomes two characters
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    with contextlib.suppress(OSError, ValueError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        rows, columns, *pixels = struct.unpack("HHHH", size)
        size = struct.pack("HHHH", rows, columns - margin if columns > margin else columns, *pixels)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
