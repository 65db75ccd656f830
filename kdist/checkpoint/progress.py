"""A progress line for reads that take longer than two seconds, on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_PATIENCE = 2.0  # seconds until the line appears
_PAUSE = 0.1  # seconds between two updates of the line
_WIDTH = 20


@contextlib.contextmanager
def progress(what: str, num_bytes: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts finished bytes. Any thread may call it with the number of further bytes.

    The line begins with `what`. It appears only on a terminal or in a notebook, without colors, and disappears at
    the end. Nothing is written if the output is a file or a pipe, or if `shown` is false, as on other workers
    than the chief.
    """
    stream = next((one for one in (sys.stderr, sys.stdout) if _is_looked_at(one)), None) if shown else None
    if stream is None or not num_bytes:
        yield lambda more: None
        return
    line = _Line(stream, what, num_bytes)
    try:
        yield line.add
    finally:
        line.clear()


class _Line:
    def __init__(self, stream: TextIO, what: str, num_bytes: int) -> None:
        self._stream, self._what, self._total = stream, what, num_bytes
        self._lock = threading.Lock()
        self._done = self._width = 0
        self._began = time.monotonic()
        self._next = self._began + _PATIENCE

    def add(self, more: int) -> None:
        """Adds to the count, and redraws the line if `_PAUSE` has passed."""
        with self._lock:
            self._done += more
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _PAUSE
            share = min(1.0, self._done / self._total)
            full = round(_WIDTH * share)
            left = (now - self._began) * (1 - share) / max(share, 1e-9)
            drawn = f"{'━' * full}{'─' * (_WIDTH - full)}"
            state = f" {drawn} {share:.0%} of {_size(self._total)}, {left:.0f} s left"
            # Shorten the line, because `\r` cannot redraw a wrapped line. Keep the end of the path.
            room = max(0, shutil.get_terminal_size().columns - 1 - len(state))
            cut = len(self._what) > room
            what = f"…{self._what[len(self._what) - room + 1 :]}" if cut and room else self._what[:room]
            self._write(what + state)

    def clear(self) -> None:
        """Erases the line if it was drawn."""
        with self._lock:
            if self._width:
                self._write("")
                self._write("")  # moves the cursor to the first column

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            self._stream.write(f"\r{text.ljust(self._width)}")
            self._stream.flush()
        self._width = len(text)


def _is_looked_at(stream: TextIO | None) -> bool:
    if stream is None:
        return False
    try:
        is_terminal = bool(stream.isatty())
    except (AttributeError, ValueError):  # a stream that the program replaced or closed
        is_terminal = False
    # A notebook's streams are not terminals, but they also redraw a line after `\r`.
    return is_terminal or type(stream).__module__.startswith("ipykernel.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
