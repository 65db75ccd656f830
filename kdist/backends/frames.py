"""The Python frames of another thread, which runs on meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

# Until Python 3.12, to make the object that shows a frame may collect garbage, and while that calls a destructor the
# other thread may run on. Then what is shown is a frame that has ended (the process crashes), or a thread that starts
# waits for the interpreter's list of threads, holding the lock that whoever reads the list waits for.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_looking = threading.Lock()
# A child would be left with a lock that nobody releases, and without a garbage collector.
os.register_at_fork(
    before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release
)


def frames_of_thread(ident: int) -> list[FrameType]:
    """Returns the frames of a thread of some `threading.get_ident`, the innermost first; none if it is not there."""
    with _without_garbage_collection():
        return list(_outwards(sys._current_frames().get(ident)))


def stack_lines(ident: int) -> list[str]:
    """Returns the stack of a thread as a traceback shows it, the innermost call last."""
    frames = [(frame, frame.f_lineno) for frame in reversed(frames_of_thread(ident))]
    return traceback.StackSummary.extract(iter(frames)).format()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
