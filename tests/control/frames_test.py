"""Reading the frames of another thread while it runs: the frames are correct, and no thread crashes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback

import pytest

from kdist.control import frames

DEPTH = 60


@contextlib.contextmanager
def thread_inside():
    """Starts a thread that waits in a deep recursion; yields its id."""
    is_there, may_end = threading.Event(), threading.Event()

    def recurse(depth):
        if depth:
            return recurse(depth - 1)
        is_there.set()
        return may_end.wait(30)

    thread = threading.Thread(target=recurse, args=(DEPTH,))
    thread.start()
    assert is_there.wait(30)
    try:
        yield thread.ident
    finally:
        may_end.set()
        thread.join(30)


def test_the_frames_of_a_thread_from_the_innermost_outwards():
    with thread_inside() as ident:
        found = [frame.f_code.co_name for frame in frames.frames_of_thread(ident)]
        lines = frames.stack_lines(ident)
    assert found.count("recurse") == DEPTH + 1
    assert found.index("wait") < found.index("recurse") < found.index("run") < found.index("_bootstrap")
    assert "in _bootstrap\n" in lines[0] and "in wait\n" in lines[-1]
    assert any("return recurse(depth - 1)" in line for line in lines)


def test_a_thread_that_has_ended_has_no_frames():
    with thread_inside() as ident:
        pass
    assert frames.frames_of_thread(ident) == []
    assert frames.stack_lines(ident) == []


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python collects garbage between two instructions only"
)
def test_no_garbage_is_collected_while_frames_are_made():
    during = []

    def note(phase, info):
        frame = sys._getframe(1)
        if frame.f_code.co_filename == frames.__file__:
            during.append(frame.f_code.co_name)

    with thread_inside() as ident:
        threshold = gc.get_threshold()
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            looked = len(frames.frames_of_thread(ident))
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(note)
    assert looked > DEPTH
    assert "<listcomp>" not in during  # garbage may be collected before and after it
    assert gc.isenabled()


def test_who_has_switched_the_garbage_collector_off_finds_it_off():
    gc.disable()
    try:
        frames.frames_of_thread(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_can_look_and_collects_garbage():
    stop = threading.Event()
    main = threading.get_ident()

    def look():
        while not stop.is_set():
            frames.frames_of_thread(main)

    thread = threading.Thread(target=look)
    thread.start()
    codes = []
    try:
        for _ in range(20):
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                code = 3
                try:
                    code = 0 if gc.isenabled() and frames.frames_of_thread(threading.get_ident()) else 1
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        stop.set()
        thread.join(30)
    assert codes == [0] * 20
