"""One worker process: how it is started, and where its output goes."""

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
    """Returns the command that becomes `command`, an absolute path first, after asking to die with this process."""
    return [sys.executable, "-I", "-S", _START, str(os.getpid()), *command]


@dataclasses.dataclass
class Channel:
    """One of a worker's two output streams."""

    lines: list[LineStream]
    tail: Tail | None


class WorkerProcess:
    """A worker that has been planned, and started once `start` is called.

    Args:
        plan: Its number, address and environment.
        command: What it runs.
        out: Where its stdout goes.
        err: Where its stderr goes.
        prefix: What to put in front of its lines.
        log_file: Where its whole output is kept too, of a bar that is redrawn its last state.
        append: Whether that file is written on, as after a restart, and not anew.
        keep_stdin: Whether it reads the launcher's stdin.
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
        self.frozen = False  # stopped by a signal (SIGSTOP), and therefore ended
        self.pidfd: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._out, self._err = out, err
        self._prefix = prefix
        self._keep_stdin = keep_stdin
        self._append = append
        self._log: IO[str] | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also that of the worker's process group."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.exit_code is None

    def start(self) -> None:
        """Starts the process, in a session of its own so that its children can be ended with it."""
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
        """Starts it once more, after it has ended, with more variables. Its log is written on."""
        self.close()
        self.plan = dataclasses.replace(self.plan, environ={**self.plan.environ, **told})
        self.exit_code, self.tail, self._append = None, Tail(), True
        self.start()

    def _open_stdout(self, eager: bool) -> tuple[int, int]:
        # Keras redraws its progress bar only where stdout is a terminal; else it prints a line a step.
        if eager and self._out.is_terminal:
            with contextlib.suppress(OSError, ImportError):
                return _open_terminal(len(self._prefix))
        return os.pipe()

    def lines(self) -> list[LineStream]:
        """All that its output goes to."""
        return [line for channel in self.channels.values() for line in channel.lines]

    def read(self, fd: int) -> bool:
        """Reads what the worker has written to one of its streams; returns False when that has ended."""
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
        """Notes the exit code if the process has ended; says whether it has just done so."""
        if not self.alive or self.process is None or self.process.poll() is None:
            return False
        self.exit_code = self.process.returncode
        self.exited_at = time.monotonic()
        return True

    def close(self) -> None:
        """Closes what is open. The process has ended by now."""
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
    """Opens a pseudo-terminal, narrower than the real one by a margin, that passes bytes on as they are."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    settings: list[Any] = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # else every newline becomes two characters
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    with contextlib.suppress(OSError, ValueError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        rows, columns, *pixels = struct.unpack("HHHH", size)
        size = struct.pack("HHHH", rows, columns - margin if columns > margin else columns, *pixels)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
