"""Reads the Python frames of another thread while it runs."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

# Before Python 3.12, creating a frame object can collect garbage. The other thread can run on meanwhile, in a
# destructor. Then the frame object shows a frame that has ended and the process crashes. Or a new thread that
# waits for the interpreter's list of threads holds a lock that the reader of this list needs: a deadlock.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_looking = threading.Lock()
# Otherwise, a forked child would have a lock that no thread releases, and no garbage collector.
os.register_at_fork(
    before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release
)


def frames_of_thread(ident: int) -> list[FrameType]:
    """Returns the frames of the thread with this ident, innermost first; an empty list if there is none."""
    with _without_garbage_collection():
        frame = sys._current_frames().get(ident)
        return [] if frame is None else [outer for outer, _ in traceback.walk_stack(frame)]


def stack_lines(ident: int) -> list[str]:
    """Returns the stack of a thread in the format of a traceback, innermost call last."""
    frames = [(frame, frame.f_lineno) for frame in reversed(frames_of_thread(ident))]
    return traceback.StackSummary.extract(iter(frames)).format()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    with _looking:
        stops = _COLLECTS_ANYWHERE and gc.isenabled()
        if stops:
            gc.disable()
        try:
            yield
        finally:
            if stops:
                gc.enable()
