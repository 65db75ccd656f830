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
"""Whether a `KeyboardInterrupt` was raised inside the last `kept`."""
_is_active = False


@contextlib.contextmanager
def kept() -> Iterator[bool]:
    """Notes each `KeyboardInterrupt` that the program's handler of Ctrl-C raises, for `check`.

    Yields whether the caller must check. Inside itself, and in other threads than the main thread, this does nothing.
    """
    global _is_active, is_pressed
    if _is_active or threading.current_thread() is not threading.main_thread():
        yield False
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        global is_pressed
        try:
            previous(signum, frame)  # type: ignore[operator, misc]
        except KeyboardInterrupt:
            is_pressed = _is_active  # a callback may have kept this function as its handler
            raise

    try:
        _is_active, is_pressed = True, False
        if callable(previous):
            signal.signal(signal.SIGINT, note)
        yield True
    finally:
        try:
            if signal.getsignal(signal.SIGINT) is note:  # else a callback has installed a handler
                signal.signal(signal.SIGINT, previous)
        finally:
            _is_active = False


def note_ignored() -> None:
    """Notes a `KeyboardInterrupt` that the caller has caught and does not raise again."""
    global is_pressed
    is_pressed = _is_active


def check() -> None:
    """Raises the `KeyboardInterrupt` that a library has ignored or replaced inside `kept`."""
    if is_pressed and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt from None
