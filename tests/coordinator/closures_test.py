"""Each closure counts once, even when workers are lost, and each error is reported once."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from kdist.coordinator.closures import Cancelled, Closures, Staleness


def nothing() -> None:
    """Does nothing; closures need a function, which no test calls."""


def added(number: int, most: int | None = None) -> tuple[Closures, list[Any], list[Any]]:
    """Returns waiting closures, their results, and the list that collects their outcomes."""
    closures, told = Closures(Staleness(most)), []
    results = [closures.add(nothing, (), {}, told.append) for _ in range(number)]
    return closures, results, told


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [None, 0, 2])
def test_each_is_done_once_although_workers_are_lost(seed: int, most: int | None) -> None:
    closures, results, told = added(100, most)
    draw = random.Random(seed)
    runs: list[int] = []
    repeated = set()

    def work(draw: random.Random) -> None:
        while (closure := closures.take(0.2)) is not None:
            runs.append(closure.index)
            # The servers must not yet have forgotten a closure that may run again.
            assert closures.oldest() <= closure.index
            if draw.random() < 0.3:
                repeated.add(closure.index)
                closures.again(closure)
            else:
                closures.end(closure, closure.index)

    workers = [threading.Thread(target=work, args=(random.Random(draw.random()),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    closures.wait()
    assert [result.fetch() for result in results] == list(range(100)) == sorted(told)
    assert closures.done()
    assert closures.oldest() == 100
    assert repeated and len(runs) > 100 and set(runs) == set(range(100))
    for worker in workers:
        worker.join()


@pytest.mark.kills("servers_closure_lost_with_its_worker")
def test_what_was_lost_runs_before_the_others() -> None:
    closures, _, _ = added(3)
    first = closures.take(0)
    assert first is not None
    closures.again(first)
    assert closures.take(0) is first


def test_an_error_is_told_once_and_drops_what_waits() -> None:
    closures, results, told = added(3)
    running = [closures.take(0), closures.take(0)]
    assert running[0] and running[1]
    closures.end(running[0], error=ValueError("its own"))
    with pytest.raises(ValueError, match="its own"):
        results[0].fetch()
    with pytest.raises(Cancelled, match="because another function failed: ValueError: its own"):
        results[2].fetch()
    closures.end(running[1], "what ran beside it counts")
    assert results[1].fetch() == told[0] == "what ran beside it counts"
    with pytest.raises(ValueError, match="its own"):
        closures.wait()
    closures.wait()
    assert closures.done()
    assert closures.add(nothing, (), {}) is not None


def test_who_waits_for_an_error_waits_for_those_that_run() -> None:
    closures, _, _ = added(2)
    running = [closures.take(0), closures.take(0)]
    assert running[0] and running[1]
    closures.end(running[0], error=ValueError("its own"))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            closures.wait()
        except ValueError as error:
            raised.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    closures.end(running[1])
    waits.join(10)
    assert len(raised) == 1


def test_what_is_lost_after_an_error_is_not_run_again() -> None:
    closures, results, _ = added(2)
    running = [closures.take(0), closures.take(0)]
    assert running[0] and running[1]
    closures.end(running[0], error=ValueError("its own"))
    closures.again(running[1])
    assert closures.take(0) is None
    with pytest.raises(Cancelled):
        results[1].fetch()


def test_the_end_of_the_job_is_told_by_every_call() -> None:
    closures, results, _ = added(2)
    assert closures.take(0) is not None
    closures.fail(RuntimeError("a server is lost"))
    calls = [closures.wait, closures.done, results[0].fetch, lambda: closures.add(nothing, (), {})]
    for call in 2 * calls:
        with pytest.raises(RuntimeError, match="a server is lost"):
            call()
    with pytest.raises(Cancelled):
        results[1].fetch()
    assert closures.take(0) is None


def test_what_is_left_out_when_training_ends() -> None:
    closures, results, _ = added(3)
    running = closures.take(0)
    assert running
    cancels = threading.Thread(target=closures.cancel)
    cancels.start()
    with pytest.raises(Cancelled, match="has ended"):
        results[1].fetch()
    cancels.join(0.1)
    assert cancels.is_alive()  # waits for the running closure
    closures.end(running, 1)
    cancels.join(10)
    assert closures.done()  # does not raise
    assert results[0].fetch() == 1


@pytest.mark.kills("servers_closure_left_after_its_training")
def test_what_is_lost_when_training_ends_is_not_run_again() -> None:
    closures, results, _ = added(1)
    running = closures.take(0)
    assert running
    cancels = threading.Thread(target=closures.cancel)
    cancels.start()
    cancels.join(0.1)
    closures.again(running)
    cancels.join(10)
    assert closures.done()
    with pytest.raises(Cancelled, match="has ended"):
        results[0].fetch()


@pytest.mark.kills("servers_closure_before_the_result_that_it_needs")
def test_what_needs_a_result_waits_for_it() -> None:
    closures, results, _ = added(2)
    first = closures.take(0)
    assert first
    first.needs = results[1]
    closures.again(first)
    second = closures.take(0)
    assert second and second is not first
    assert closures.take(0) is None
    closures.end(second)
    assert closures.take(0) is first


def test_who_waits_for_a_closure_sees_the_end() -> None:
    closures, results, _ = added(1)
    closures.close()
    assert closures.is_closed
    assert closures.take(60) is None
    with pytest.raises(Cancelled, match="coordinator has shut down"):
        results[0].fetch()


def test_waiting_until_some_are_left() -> None:
    closures, _, _ = added(3)
    closures.wait(at_most=3)
    running = closures.take(0)
    assert running
    closures.end(running)
    closures.wait(at_most=2)
    assert not closures.done()
