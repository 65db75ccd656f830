"""Ctrl-C while an engine runs: no library between the key and your program can hide the interrupt.

Python raises `KeyboardInterrupt` inside the function that runs at that moment. Some functions ignore it, for
example NumPy while it waits for an array of JAX, XLA's compiler, and callbacks of the garbage collector. Others
raise another error instead, for example pybind11. `fit` would then continue, or report the wrong error.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

is_pressed = False
"""Whether a `KeyboardInterrupt` was raised inside `kept`, which is running."""
_is_active = False


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Notes each `KeyboardInterrupt` that the program's signal handler raises, for `check`.

    In other threads than the main thread, without a handler in Python, and inside itself, this does nothing.
    """
    global _is_active, is_pressed
    previous = signal.getsignal(signal.SIGINT)
    if _is_active or not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, frame: FrameType | None) -> None:
        global is_pressed
        try:
            previous(signum, frame)
        except KeyboardInterrupt:
            is_pressed = True
            raise

    try:
        _is_active = True
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        try:
            if signal.getsignal(signal.SIGINT) is note:  # else a callback has installed a handler
                signal.signal(signal.SIGINT, previous)
        finally:
            _is_active = is_pressed = False


def check() -> None:
    """Raises the `KeyboardInterrupt` that a library has ignored or replaced inside `kept`."""
    if is_pressed:
        raise KeyboardInterrupt from None
