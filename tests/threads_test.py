"""The threads that run the replicas of one worker in turn, and their errors."""

import signal
import threading
import time

import pytest

from kdist.backends.threads import ReplicaThreads
from kdist.errors import WorkerMismatchError

NAMES = ["replica 0", "replica 1", "replica 2"]


@pytest.fixture
def threads():
    return ReplicaThreads(NAMES)


def test_one_replica_runs_at_a_time_in_the_same_order(threads):
    running = []
    order = []

    def body(index, baton):
        for step in range(20):
            running.append(index)
            assert len(running) == 1
            time.sleep(0.0005)  # would let another thread run
            order.append(index)
            running.pop()
            total = baton.meet(index, ("sum", step), index + step, sum)
            assert total == 3 + 3 * step
        return index

    assert threads.run(body) == [0, 1, 2]
    assert order == [0, 1, 2] * 20


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("meetings", [0, 1])
def test_an_error_in_one_replica_ends_all_and_keeps_its_type(threads, failing, meetings):
    ended = []

    def body(index, baton):
        try:
            for _ in range(meetings):
                baton.meet(index, ("sum", None), 0, sum)
            if index == failing:
                raise ZeroDivisionError("mine")
            baton.meet(index, ("sum", None), 0, sum)
        finally:
            ended.append(index)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        threads.run(body)
    assert caught.value.__notes__ == [f"Raised in replica {failing}."]
    # Replicas that had not started need not start. All replicas that started have ended.
    assert failing in ended
    assert len(ended) == len(set(ended))
    assert threads.run(lambda index, baton: index) == [0, 1, 2]


def test_a_replica_cannot_go_on_after_another_has_failed(threads):
    def body(index, baton):
        try:
            baton.meet(index, ("sum", None), 0, sum)
            if index == 0:
                raise ZeroDivisionError
            baton.meet(index, ("sum", None), 0, sum)
        except BaseException:  # user code that catches everything
            if index == 0:
                raise
            baton.meet(index, ("sum", None), 0, sum)

    with pytest.raises(ZeroDivisionError):
        threads.run(body)


def test_different_collectives_are_an_error_and_no_hang(threads):
    with pytest.raises(
        WorkerMismatchError, match=r"replica 0 reached the sum of 4 and replica 1 reached the sum of 5"
    ):
        threads.run(lambda index, baton: baton.meet(index, ("sum", 4 + index % 2), 0, sum))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_replica_that_ends_while_others_meet_is_an_error_and_no_hang(threads, who):
    def body(index, baton):
        if index != who:
            baton.meet(index, ("sum", 4), 0, sum)

    with pytest.raises(WorkerMismatchError, match=r"end of the step"):
        threads.run(body)


def test_ctrl_c_in_the_first_replica_waits_for_the_others(threads):
    seen = []

    def body(index, baton):
        baton.meet(index, ("sum", None), 0, sum)
        if index == 1:
            deadline = time.monotonic() + 20
            # Waits until the first replica, which waits for its turn, detects the signal.
            while baton.error is None:
                assert time.monotonic() < deadline
                # Sent repeatedly, because Python can miss a signal just before it waits for a lock.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                again = time.monotonic() + 0.5
                while baton.error is None and time.monotonic() < again:
                    time.sleep(0.001)
            time.sleep(0.05)  # the first replica must not end during this time
            seen.append("the second went on until the next meeting")
        try:
            baton.meet(index, ("sum", None), 0, sum)
        finally:
            if index == 0:
                seen.append("the first ended")

    with pytest.raises(KeyboardInterrupt):
        threads.run(body)
    assert seen == ["the second went on until the next meeting", "the first ended"]
    assert threads.run(lambda index, baton: index) == [0, 1, 2]


def test_threads_are_kept_between_steps_and_end_with_their_owner(threads):
    before = set(threading.enumerate())
    threads.run(lambda index, baton: None)
    started = set(threading.enumerate())
    assert len(started - before) == 2
    threads.run(lambda index, baton: None)
    assert not set(threading.enumerate()) - started
    owner = ReplicaThreads(NAMES)
    owner.run(lambda index, baton: None)
    of_owner = set(threading.enumerate()) - started
    assert len(of_owner) == 2
    del owner
    for thread in of_owner:
        thread.join(5.0)
        assert not thread.is_alive()


def test_context_variables_travel(threads):
    import contextvars

    variable = contextvars.ContextVar("variable")
    variable.set("here")
    assert threads.run(lambda index, baton: variable.get()) == ["here"] * 3
