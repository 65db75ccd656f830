"""Shows the output of the workers live, with the worker's name before each line, and keeps the last lines."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from kdist.cluster import environment

_SPLIT = re.compile(rb"(\r|\n)")
_COLOR = re.compile(rb"\x1b\[([0-9;]*)m")
_CUT = re.compile(rb"(\x1b(\[[0-9;]*)?|\xe2\x94?)\Z")  # an incomplete color code or bar character
_LONGEST = 65536  # bytes: longer partial lines are shown immediately
_RANK = re.compile(rb"\A\[rank\d+\]: ")  # PyTorch prints this before each line of a traceback
_LOST = b"The job lost "  # in the error of a worker that lost another worker
_REPORTED = re.compile(rb"Received: .*\bfailed_worker=")  # in an error that reports another worker's error
_PATIENCE = 1.0  # seconds until a partial line is shown
_BLOCKED = 0.1  # seconds between two calls of `gives_up`


class Sink:
    """A destination of output: the text stream of a terminal, a file, a pipe or a notebook."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bytes = getattr(stream, "buffer", None)
        self._poll: select.poll | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            descriptor = stream.fileno()
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLOUT)
        self.is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.has_colors = self.is_terminal and not environment.get("NO_COLOR")
        self.open_line: LineStream | None = None
        self.broken = stream is None  # the shell closed it: `kdist run train.py >&-`
        self.gives_up: Callable[[], bool] | None = None
        """Returns whether to discard output that no program reads; `None` to wait for the reader."""

    def write(self, data: bytes) -> None:
        """Writes and flushes. Ignores a closed pipe (`| head`), because the job must still be supervised."""
        if self.broken or not data:
            return
        try:
            if self._bytes is not None:
                # A pipe that is ready accepts this many bytes. A longer write could block, despite signals.
                for start in range(0, len(data), select.PIPE_BUF):
                    self._wait()
                    self._bytes.write(data[start : start + select.PIPE_BUF])
                    self._stream.flush()
            else:
                self._stream.write(data.decode("utf-8", "replace"))
                self._stream.flush()
        except (OSError, ValueError):
            self.broken = True

    def _wait(self) -> None:
        """Waits until the stream accepts output.

        Raises:
            TimeoutError: If `gives_up` returns `True` before.
        """
        while self._poll and self.gives_up and not self._poll.poll(_BLOCKED * 1000):
            if self.gives_up():
                raise TimeoutError

    def say(self, text: str) -> None:
        """Writes a line of the launcher itself."""
        self.end_line()
        self.write(f"{text}\n".encode("utf-8", "backslashreplace"))

    def end_line(self) -> None:
        """Ends an open line, so that the next output starts on a new line."""
        if self.open_line is not None:
            self.write(b"\n")
            self.open_line = None


def sinks() -> tuple[Sink, Sink]:
    """Returns sinks for stdout and stderr, which are the same if both go to the same file or terminal."""
    out = Sink(sys.stdout)
    try:
        same = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        same = sys.stdout is sys.stderr
    return out, out if same else Sink(sys.stderr)


class LineStream:
    """One output stream of one worker, with `prefix` before each line; `None` passes all output through unchanged.

    Whole lines are written immediately. A partial line (a prompt, or a redrawn progress bar) is shown live on a
    terminal if `eager` is set, otherwise after one second. If the output is not a terminal, only the last state
    of a redrawn line is kept. Colors are removed there, and if `NO_COLOR` is set.
    """

    def __init__(self, sink: Sink, prefix: str | None, eager: bool = False) -> None:
        self._sink = sink
        self._untouched = prefix is None
        self._prefix = (prefix or "").encode()
        self._eager = eager and sink.is_terminal
        self._plain = None if sink.has_colors else _Plain()
        self._text = b""
        self._shown = 0
        self._redraw = False  # a carriage return came: the next text replaces this line
        self._restart = False  # the open line on the terminal must be overwritten
        self._since = 0.0

    def feed(self, data: bytes) -> None:
        """Processes output of the worker, which can be split at any position."""
        if self._untouched:
            self._sink.write(data)
            return
        for piece in _SPLIT.split(self._plain(data) if self._plain else data):
            if piece == b"\n":
                self._show()
                self._sink.end_line()
                self._text, self._shown, self._redraw, self._restart = b"", 0, False, False
            elif piece == b"\r":
                self._text = self._text.rstrip(b"\b")
                self._redraw = True
            elif piece:
                self._append(piece)
        if self._text and (self._eager or len(self._text) > _LONGEST):
            self._show()

    def _append(self, piece: bytes) -> None:
        if self._redraw:
            self._redraw = False
            self._text, self._shown = b"", 0
            if self._sink.open_line is self:
                if self._sink.is_terminal:
                    self._restart = True
                else:
                    self._sink.end_line()
        if not self._text:
            self._since = time.monotonic()
        self._text += piece

    def _show(self) -> None:
        if self._sink.open_line is not self:
            self._sink.end_line()
            self._sink.write(self._prefix + self._text)
            self._sink.open_line = self
        elif self._restart:
            self._sink.write(b"\r" + self._prefix + self._text + b"\x1b[K")
        else:
            self._sink.write(self._text[self._shown :])
        self._shown = len(self._text)
        self._restart = False
        if self._shown > _LONGEST:
            self._sink.end_line()
            self._text, self._shown = b"", 0

    def waits(self) -> bool:
        return bool(self._text) and self._shown < len(self._text) and not self._redraw

    def tick(self) -> None:
        """Shows a partial line that has waited long enough."""
        if self.waits() and time.monotonic() - self._since > _PATIENCE:
            self._show()

    def close(self) -> None:
        """Shows the remaining output after the end of the worker."""
        if self._plain and self._plain.rest:
            self._append(self._plain.rest)
        if self._text:
            self._show()
        if self._sink.open_line is self:
            self._sink.end_line()
        self._text = b""


class _Plain:
    """Removes colors from a text that arrives in pieces, split at any position.

    Keras's progress bar marks the remaining part only by its color. Here, it gets another line character.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._is_left = False

    def __call__(self, data: bytes) -> bytes:
        data = self.rest + data
        cut = _CUT.search(data)
        self.rest = cut[0] if cut else b""
        parts = _COLOR.split(data[: cut.start()] if cut else data)
        shown = []
        for position, part in enumerate(parts):
            if position % 2:
                self._is_left = part == b"37"
            else:
                shown.append(part.replace("━".encode(), "─".encode()) if self._is_left else part)
        return b"".join(shown)


class Tail:
    """Keeps the last lines of a worker's stderr for the failure report."""

    def __init__(self, most: int = 400) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=most)
        self._rest = b""
        self.traceback_at: float | None = None
        self.has_lost_another = False
        """Whether the worker reported that it failed because another worker failed or was lost."""
        self.reports_another = False
        """Whether the worker reported that it failed because the code of another worker failed."""

    def feed(self, data: bytes) -> None:
        """Processes output of the worker, which can be split at any position."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in (_RANK.sub(b"", line) for line in lines):
            if line.lstrip(b" |+").startswith(b"Traceback (most recent call last)"):
                self.traceback_at = time.monotonic()
            self.reports_another |= _REPORTED.search(line) is not None
            self.has_lost_another |= self.reports_another or _LOST in line
            self._lines.append(line[:2000])
        self._rest = self._rest[-_LONGEST:]

    def lines(self) -> list[str]:
        kept = [*self._lines, self._rest] if self._rest else [*self._lines]
        return [line.decode("utf-8", "replace").rstrip().rpartition("\r")[2] for line in kept]
