"""Workers sum up in shared memory. Each worker is a thread here."""

from __future__ import annotations

import concurrent.futures
import mmap
import signal
import socket
import threading
import time
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from kdist.communication import interrupts, shared_memory
from kdist.communication.memory_offer import Offer
from kdist.communication.shared_memory import SLOT, SLOTS, SharedMemory
from kdist.errors import WorkerMismatchError

SECONDS = 60.0


def on_workers(count, function, seconds=SECONDS, change=lambda offers: offers, fails=()):
    """Connects workers, calls a function with each worker's memory and index, and returns the results."""
    offers = [Offer(index, count, True) for index in range(count)]
    described = change([offer.description for offer in offers])
    barrier, answers = threading.Barrier(count), [True] * count

    def gather(value):
        answers[int(threading.current_thread().name)] = value
        barrier.wait(SECONDS)
        return answers

    def work(index):
        threading.current_thread().name = str(index)
        memory = offers[index].connect(described, lambda ok: gather(ok and index not in fails), seconds)
        try:
            return function(memory, index)
        finally:
            if memory:
                memory.close()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, index) for index in range(count)]
        return [future.result(SECONDS + 10) for future in futures]


def arrays_of(worker, seed, count=40):
    random, mine = np.random.default_rng(seed), np.random.default_rng([seed, worker])
    made = []
    for _ in range(count):
        size = (0, 1, 7, 20_000, 300_001)[random.integers(5)]
        dtype = ("float32", "float64", "int64", ml_dtypes.bfloat16)[random.integers(4)]
        made.append((mine.integers(-100, 100, size) / (1 if dtype == "int64" else 8)).astype(dtype))
    return made


@pytest.mark.kills(
    "shared_memory_reused_too_early",
    "shared_memory_waits_for_no_part",
    "shared_memory_lost_rows_of_the_last_worker",
)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_sums_in_any_order_of_waiting(count, seed):
    def work(memory, index):
        arrays, random, started = arrays_of(index, seed), np.random.default_rng([seed, index]), []
        for array in arrays:
            started.append(memory.start([array]))
            while started and random.random() < 0.35:
                started.pop(random.integers(len(started))).wait()
            if random.random() < 0.2:
                time.sleep(0.002)
        for one in started:
            one.wait()
        return arrays

    everyone = [arrays_of(index, seed) for index in range(count)]
    expected = [np.stack(parts).astype("float64").sum(0) for parts in zip(*everyone, strict=True)]
    for found in on_workers(count, work):
        for ours, others, total in zip(found, everyone[0], expected, strict=True):
            # Multiples of 1/8 are exact, except for sums that need more digits than bfloat16 has.
            assert ours.dtype == others.dtype
            is_short = ours.dtype == ml_dtypes.bfloat16
            np.testing.assert_allclose(
                ours.astype("float64"), total, rtol=0.03 if is_short else 0, atol=2 if is_short else 0
            )


@pytest.mark.kills("shared_memory_loses_the_rest_of_an_array")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("piece", [64, 4096, 1 << 20])
def test_arrays_of_any_size_together(count, piece, monkeypatch):
    monkeypatch.setattr(shared_memory, "_PIECE", piece)
    sizes = (1, 0, 700, 16, 20_001, 3)
    random = np.random.default_rng(piece)
    everyone = [[random.integers(0, 1000, size).astype("float32") for size in sizes] for _ in range(count)]

    def work(memory, index):
        results = [np.empty_like(array) for array in everyone[index]]
        memory.sum_all(everyone[index], results)
        memory.sum_all(everyone[index][:1], results[:1])
        return results

    for found in on_workers(count, work):
        for total, *parts in zip(found, *everyone, strict=True):
            np.testing.assert_array_equal(total, sum(parts))


def test_all_workers_get_the_same_bits():
    values = np.random.default_rng(0).random((3, 100_000), dtype="float32")

    def work(memory, index):
        mine = values[index].copy()
        memory.start([mine]).wait()
        return mine

    for found in on_workers(3, work):
        np.testing.assert_array_equal(found, values[0] + values[1] + values[2])


@pytest.mark.kills("shared_memory_of_different_sizes")
@pytest.mark.parametrize("sizes", [(3, 4), (3, 3, 4), (100_000, 100_000, 100_001)])
def test_workers_that_sum_different_arrays_get_an_error(sizes):
    def work(memory, index):
        one = memory.start([np.ones(sizes[index])])
        with pytest.raises(WorkerMismatchError, match=f"worker {len(sizes) - 1}"):
            one.wait()
        with pytest.raises(WorkerMismatchError):
            one.wait()
        assert one.is_completed()

    on_workers(len(sizes), work)


@pytest.mark.kills("shared_memory_of_a_lost_worker")
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_worker_that_ends_is_noticed_at_once(size):
    def work(memory, index):
        if index == 2:
            return
        began = time.monotonic()
        one = memory.start([np.ones(size)])
        with pytest.raises(RuntimeError, match="Connection closed: worker"):
            one.wait()
        assert one.is_completed() and time.monotonic() - began < 20

    on_workers(3, work)


def test_a_worker_that_does_not_come():
    ended = threading.Barrier(2)

    def work(memory, index):
        if index == 0:
            one = memory.start([np.ones(3)])
            assert not one.is_completed()
            with pytest.raises(RuntimeError, match=r"Timed out after 1 s\."):
                one.wait()
            assert one.is_completed()
        ended.wait(SECONDS)

    on_workers(2, work, seconds=1.0)


def test_signals_do_not_prevent_a_timeout():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    regions = [mmap.mmap(-1, SLOTS * SLOT) for _ in range(2)]
    memory = SharedMemory(0, {1: ours}, regions, 1.0)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)  # a profiler
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"Timed out after 1 s\."):
            memory.start([np.ones(3)]).wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        memory.close()
        theirs.close()
    assert time.monotonic() - began < 5


@pytest.mark.kills("shared_memory_adds_twice_after_ctrl_c")
@pytest.mark.parametrize("late", ["start", "wait"])
def test_ctrl_c_while_waiting_changes_no_sum(late):
    def interrupt():
        raise KeyboardInterrupt

    def work(memory, index):
        array = np.full(100_000, float(index))
        if index == 2 and late == "start":
            time.sleep(1.5)
        one = memory.start([array])
        if index == 2 and late == "wait":
            time.sleep(1.5)
        if index == 0:
            memory.check_others = interrupt
            with pytest.raises(KeyboardInterrupt):
                one.wait()
            memory.check_others = lambda: None
        one.wait()
        return array

    for found in on_workers(3, work):
        np.testing.assert_array_equal(found, np.full(100_000, 3.0))


def test_dtypes_and_pieces_of_arrays():
    def work(memory, index):
        assert memory.can_sum(np.dtype("float32")) and memory.can_sum(np.dtype(ml_dtypes.bfloat16))
        for size, number in ((0, 1), (1 << 18, 1), ((1 << 18) + 1, 2)):
            pieces = memory.pieces_of(array := np.arange(size, dtype="float32"))
            assert len(pieces) == number
            np.testing.assert_array_equal(np.concatenate(pieces), array)
        assert not memory.can_sum(np.dtype("bool"))

    on_workers(2, work)


@pytest.mark.kills("shared_memory_sum_lost_after_ctrl_c", "ctrl_c_lost_in_a_sum")
def test_ctrl_c_waits_for_the_sum_of_a_program():
    def interrupt():
        raise KeyboardInterrupt

    def work(memory, index):
        if index == 1:
            time.sleep(1.5)
        memory.check_others = interrupt if index == 0 else lambda: None
        result = np.empty(3)
        memory.sum_all([np.full(3, 1.0 + index)], [result])
        return result.tolist()

    with mock.patch.object(interrupts, "note_ignored") as note:
        assert on_workers(2, work) == [[3.0] * 3] * 2
    assert note.call_count == 1


@pytest.mark.kills("shared_memory_of_two_machines")
def test_workers_of_two_machines_share_no_memory():
    def elsewhere(offers):
        return [offers[0], offers[1] | {"machine": ["another", *offers[1]["machine"][1:]]}]

    assert on_workers(2, lambda memory, index: memory, change=elsewhere) == [None, None]
    assert on_workers(2, lambda memory, index: memory, change=lambda offers: [offers[0], None]) == [
        None,
        None,
    ]


def test_a_worker_that_cannot_connect():
    assert on_workers(2, lambda memory, index: memory, fails=(1,)) == [None, None]


def test_offers():
    def offer(count, is_wanted=True):
        return Offer(0, count, is_wanted).description

    assert offer(2) and offer(16)
    assert offer(1) is offer(17) is offer(2, False) is None
