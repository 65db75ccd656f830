"""Starts a worker process, and handles its output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from kdist.launch.output import LineStream, Sink, Tail
from kdist.launch.plan import WorkerPlan

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_start.py")


def start_command(command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` (with an absolute path) and is killed if this process dies."""
    return [sys.executable, "-I", "-S", _START, str(os.getpid()), *command]


@dataclasses.dataclass
class Channel:
    """One of the two output streams of a worker."""

    lines: list[LineStream]
    tail: Tail | None


class WorkerProcess:
    """A worker process. Call `start` to start it.

    Args:
        plan: The index, address and environment of the worker.
        command: The command of the worker.
        out: Receives its stdout.
        err: Receives its stderr.
        prefix: The text before each line of output.
        log_file: A file for a copy of its output, with only the last state of progress bars.
        append: Whether to append to the log file instead of replacing it, for example after a restart.
        keep_stdin: Whether the worker inherits the launcher's stdin.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        command: Sequence[str],
        out: Sink,
        err: Sink,
        *,
        prefix: str = "",
        log_file: str | None = None,
        append: bool = False,
        keep_stdin: bool = False,
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.command = list(command)
        self.log_file = log_file
        self.tail = Tail()
        self.channels: dict[int, Channel] = {}
        self.exit_code: int | None = None
        self.exited_at = 0.0
        self.frozen = False  # stopped by a signal (SIGSTOP), and therefore killed
        self.pidfd: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._out, self._err = out, err
        self._prefix = prefix
        self._keep_stdin = keep_stdin
        self._append = append
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
        logs: list[Sink] = []
        if self.log_file:
            mode = "a" if self._append else "w"
            self._log = open(self.log_file, mode, encoding="utf-8")  # noqa: SIM115  # closed with the worker
            logs = [Sink(self._log)]
        eager = (self.plan.index == 0 and not self.plan.helps) or not self._prefix
        out_read, out_write = self._open_stdout(eager)
        err_read, err_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                start_command(self.command),
                env=self.plan.environ,
                stdin=None if self._keep_stdin else subprocess.DEVNULL,
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
        for fd, sink, tail in ((out_read, self._out, None), (err_read, self._err, self.tail)):
            shown = LineStream(sink, self._prefix or None, eager)
            self.channels[fd] = Channel([shown, *(LineStream(log, "") for log in logs)], tail)
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.process.pid)

    def restart(self, told: Mapping[str, str]) -> None:
        """Restarts the process after its exit, with additional variables. Appends to its log file."""
        self.close()
        self.plan = dataclasses.replace(self.plan, environ={**self.plan.environ, **told})
        self.exit_code, self.tail, self._append = None, Tail(), True
        self.start()

    def _open_stdout(self, eager: bool) -> tuple[int, int]:
        # Keras redraws its progress bar only if stdout is a terminal. Otherwise it prints one line per step.
        if eager and self._out.is_terminal:
            with contextlib.suppress(OSError, ImportError):
                return _open_terminal(len(self._prefix))
        return os.pipe()

    @property
    def sinks(self) -> tuple[Sink, Sink]:
        """The destinations of its stdout and stderr, without the log file."""
        return self._out, self._err

    def lines(self) -> list[LineStream]:
        """Returns all destinations of the output."""
        return [line for channel in self.channels.values() for line in channel.lines]

    def read(self, fd: int) -> bool:
        """Reads output from one of the streams. Returns `False` at the end of the stream."""
        try:
            data = os.read(fd, 65536)
        except OSError:  # a terminal whose other end is closed
            data = b""
        channel = self.channels[fd]
        if not data:
            for line in channel.lines:
                line.close()
            del self.channels[fd]
            os.close(fd)
            return False
        if channel.tail is not None:
            channel.tail.feed(data)
        for line in channel.lines:
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
        for fd, channel in self.channels.items():
            for line in channel.lines:
                line.close()
            os.close(fd)
        self.channels.clear()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self._log is not None:
            self._log.close()
            self._log = None


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
