"""Detection of hung workers with a fake clock: the tests do not wait, and a busy machine does not affect them."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest

from kdist.control import stalls, whereabouts
from kdist.errors import WorkerLostError

HEARTBEAT = 10.0  # so a worker publishes after 2 s that it waits, and kdist suspects a worker after 7 s


class Ended(Exception):
    """Raised instead of ending the process."""


class Board(stalls.Board):
    names, index = ["worker 0", "worker 1"], 1

    def __init__(self):
        self.said = []
        self.waits = {0: "all_reduce at step 3 of epoch 1"}
        self.pending = False
        self.dead = {}
        self.farewells = []

    def say(self, text):
        self.said.append(text)

    def waiting(self):
        return self.waits

    def waits_in(self, filename):
        return self.pending and filename == __file__

    def died(self):
        return self.dead

    def leave(self, loss):
        self.farewells.append(loss.reason)


class Watched:
    """The watched thread: it waits at one of two lines, and `move` makes it continue to the other line."""

    def __init__(self):
        self.lines = [threading.Semaphore(0), threading.Semaphore(0)]
        self.arrived = threading.Semaphore(0)
        self.done = False
        self.turn = 0
        self.thread = threading.Thread(target=self.stand, daemon=True)
        self.thread.start()
        assert self.arrived.acquire(timeout=10)

    def stand(self):
        first, second = self.lines
        with stalls.entered():
            while not self.done:
                self.arrived.release()
                first.acquire()
                self.arrived.release()
                second.acquire()

    def move(self):
        self.lines[self.turn].release()
        self.turn = 1 - self.turn
        assert self.arrived.acquire(timeout=10)

    def leave(self):
        self.done = True
        for line in self.lines:
            line.release()
        self.thread.join(10)


class Machine(stalls.Machine):
    """A fake clock that advances with each pause, and calls `each` with the machine once per second."""

    def __init__(self, each, until):
        self.time = self.cpu = 0.0
        self.works = False
        self.each, self.until, self.whole = each, until, 0
        self.ended = None

    def now(self):
        return self.time

    def cpu_seconds(self):
        return self.cpu

    def others_work(self):
        return self.works

    def pause(self, closed, seconds):
        self.time += seconds
        while self.time >= self.whole + 1:
            self.whole += 1
            self.each(self)
        return closed.is_set() or self.time > self.until

    def end(self, code):
        self.ended = code, self.time
        raise Ended


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setenv("KDIST_HEARTBEAT_TIMEOUT", str(HEARTBEAT))
    monkeypatch.setenv("KDIST_HANG_TIMEOUT", "7")
    monkeypatch.setattr(stalls, "_told", False)
    monkeypatch.setattr(whereabouts, "total_steps", 0)
    thread = Watched()
    yield thread
    thread.leave()


def watch(board, each=lambda machine: None, until=60.0):
    """Watches for a minute of the fake clock; returns the machine with the exit code and time of the process."""
    machine = Machine(each, until)
    machine.watching = stalls.StallWatch(board, board.waits_in, machine)
    with contextlib.suppress(Ended):
        machine.watching.run()
    return machine


def test_a_worker_that_stands_still_ends_and_says_where(watched, capfd):
    board = Board()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whereabouts, "describe", lambda: "step 3 of epoch 1")
        code, when = watch(board).ended
    assert code == 70 and 7 < when <= 8
    said = capfd.readouterr().err
    assert "worker 1 hung: its main thread made no progress and used no CPU for 8 s" in said
    assert "at step 3 of epoch 1. Other workers wait for it: worker 0 in all_reduce at step 3" in said
    assert "Traceback (most recent call last):\n" in said and "in stand" in said
    assert board.farewells == ["it hung at step 3 of epoch 1"]
    assert board.said == [], "it does not wait itself"


def test_a_worker_that_stands_still_warns_before_it_ends(watched, monkeypatch, capfd):
    monkeypatch.setenv("KDIST_HANG_TIMEOUT", "30")
    warnings = {}

    def listens(machine):
        said = capfd.readouterr().err
        if "seems to hang" in said:
            warnings[machine.whole] = said
        if machine.whole == 20:
            watched.move()

    code, when = watch(Board(), listens).ended
    assert code == 70 and 50 <= when <= 51, "30 seconds after it moved"
    assert len(warnings) == 2, "once each time that it rests"
    assert all(when - 9 <= rested <= when for when, rested in zip(warnings, (0, 20), strict=True))
    for said in warnings.values():
        assert "worker 1 seems to hang: its main thread made no progress and used no CPU for " in said
        assert "Other workers wait for it: worker 0 in all_reduce at step 3 of epoch 1" in said
        assert "kdist terminates it after 30 s without progress" in said and "in stand" in said


def test_a_worker_that_has_lost_another_does_not_wait_for_that(watched, monkeypatch):
    monkeypatch.setenv("KDIST_HANG_TIMEOUT", "600")
    board = Board()
    board.dead = {0: "it died"}
    code, when = watch(board).ended
    assert code == 1 and 7 < when <= 8


def test_the_threads_of_an_engine_do_not_count_as_work(watched):
    def idles(machine):
        machine.cpu += 0.02

    code, when = watch(Board(), idles).ended
    assert code == 70 and 7 < when <= 8


def test_nobody_has_hung_before_somebody_waits(watched):
    board = Board()
    board.waits = {}

    def comes(machine):
        if machine.whole == 30:
            board.waits = {0: "all_reduce at step 3 of epoch 1"}

    assert watch(board, comes, 29).ended is None
    code, when = watch(board, comes).ended
    assert code == 70 and 30 <= when < 31


def test_a_worker_that_has_lost_another_ends_though_nobody_waits(watched, capfd):
    board = Board()
    board.waits, board.dead = {}, {0: "it died"}
    code, when = watch(board).ended
    assert code == 1 and 7 < when <= 8
    said = capfd.readouterr().err
    assert f"{WorkerLostError.__name__}: The job lost worker 0: it died." in said
    assert board.farewells == []


def test_one_whose_user_was_told_of_a_lost_worker_may_go_on(watched, monkeypatch):
    board = Board()
    board.waits, board.dead = {}, {0: "it died"}
    monkeypatch.setattr(stalls, "_told", True)
    assert watch(board).ended is None


def computes(machine):
    machine.cpu += 1


def computes_now_and_then(machine):
    machine.cpu += 0.4 if machine.whole % 6 == 0 else 0


def a_child_computes(machine):
    machine.works = True


def takes_steps(machine):
    whereabouts.total_steps += machine.whole % 6 == 0


def calls_kdist(machine):
    if machine.whole % 6 == 0:
        stalls.calls += 1


def is_closed(machine):
    if machine.whole == 5:
        machine.watching.close()


@pytest.mark.parametrize(
    "work", [computes, computes_now_and_then, a_child_computes, takes_steps, calls_kdist, is_closed]
)
def test_a_worker_that_works_has_not_hung(watched, work):
    board = Board()
    machine = watch(board, work)
    assert machine.ended is None and board.said == []
    assert machine.time > 60 or work is is_closed


def test_a_worker_that_moves_has_not_hung(watched):
    def moves(machine):
        if machine.whole % 6 == 0 and machine.whole <= 60:
            watched.move()

    machine = watch(Board(), moves, 120)
    assert machine.ended[0] == 70 and 67 < machine.ended[1] < 68, "seven seconds after its last movement"


def test_a_worker_that_waits_itself_says_so_and_takes_it_back(watched):
    board = Board()
    board.pending = True

    def goes_on(machine):
        if machine.whole == 20:
            assert board.said == [whereabouts.describe_wait()]
            board.pending = False

    code, when = watch(board, goes_on).ended
    assert board.said == [whereabouts.describe_wait(), None]
    assert code == 70 and 27 < when < 28, "from when it waits no more"


def test_to_wait_for_a_thread_that_waits_is_to_wait(watched):
    board = Board()
    with stalls.waiting_for_thread(lambda: True):
        assert watch(board).ended is None
    assert board.said == [whereabouts.describe_wait()]
    with stalls.waiting_for_thread(lambda: False):
        assert watch(board).ended is not None


def test_a_watch_that_could_not_look_does_not_judge(watched):
    # For example, after a laptop's sleep, or after a C++ call that blocks all other threads.
    def sleeps(machine):
        if machine.whole == 5:
            machine.time += 6

    code, when = watch(Board(), sleeps).ended
    assert code == 70 and 11 + 7 < when < 11 + 8


def test_somebody_at_a_prompt_may_rest(watched):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        assert watch(Board()).ended is not None, "inside a call the prompt does not count"
        patch.setattr(stalls, "_watched_thread", lambda: watched.thread.ident)
        patch.setattr(stalls, "_inside", [])
        assert watch(Board()).ended is None
