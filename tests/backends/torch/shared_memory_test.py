"""Sums in shared memory. Each worker is a thread here."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import types

import pytest

from tests.backends.where import in_worker

if in_worker:
    import torch

    from kdist.backends.torch import shared_memory
    from kdist.backends.torch.shared_memory import Offer
    from kdist.errors import WorkerMismatchError

SECONDS = 60.0


def on_workers(count, function, seconds=SECONDS, change=lambda offers: offers, fails=()):
    """Connects workers, and calls a function with the memory and the index of each; returns the results."""
    offers = [Offer(types.SimpleNamespace(worker_index=i, num_workers=count), True) for i in range(count)]
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


def tensors_of(worker, seed, count=40):
    random = torch.Generator().manual_seed(seed)
    mine = torch.Generator().manual_seed(1000 * seed + worker)
    made = []
    for _ in range(count):
        size = (0, 1, 7, 20_000, 300_001)[int(torch.randint(5, (), generator=random))]
        dtype = (torch.float32, torch.float64, torch.int64, torch.bfloat16)[
            int(torch.randint(4, (), generator=random))
        ]
        made.append(
            torch.randint(-100, 100, (size,), generator=mine).to(dtype) / (1 if dtype is torch.int64 else 8)
        )
    return [tensor.to(torch.int64) if tensor.dtype is torch.int64 else tensor for tensor in made]


@pytest.mark.kills(
    "torch_shared_memory_reused_too_early",
    "torch_shared_memory_waits_for_no_part",
    "torch_shared_memory_lost_rows_of_the_last_worker",
)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_sums_in_any_order_of_waiting(count, seed):
    def work(memory, index):
        tensors = tensors_of(index, seed)
        random = torch.Generator().manual_seed(seed + index)
        started = []
        for tensor in tensors:
            started.append(memory.start(tensor))
            while started and torch.rand((), generator=random) < 0.35:
                started.pop(int(torch.randint(len(started), (), generator=random))).wait()
            if torch.rand((), generator=random) < 0.2:
                time.sleep(0.002)
        for one in started:
            one.wait()
        return tensors

    everyone = [tensors_of(index, seed) for index in range(count)]
    expected = [torch.stack(parts).double().sum(0) for parts in zip(*everyone, strict=True)]
    for found in on_workers(count, work):
        for ours, others, total in zip(found, everyone[0], expected, strict=True):
            # Multiples of 1/8 are exact, except sums that need more digits than bfloat16 has.
            exact = total.to(others.dtype)
            assert torch.allclose(
                ours.double(), exact.double(), rtol=0.03, atol=0.0 if ours.dtype is not torch.bfloat16 else 2
            )


def test_all_workers_get_the_same_bits():
    values = torch.rand(3, 100_000)
    found = on_workers(
        3, lambda memory, index: (lambda own: (memory.start(own).wait(), own)[1])(values[index].clone())
    )
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert torch.equal(found[0], values[0] + values[1] + values[2])


@pytest.mark.kills("torch_shared_memory_of_different_sizes")
@pytest.mark.parametrize("sizes", [(3, 4), (3, 3, 4), (100_000, 100_000, 100_001)])
def test_workers_that_sum_different_tensors_get_an_error(sizes):
    def work(memory, index):
        one = memory.start(torch.ones(sizes[index]))
        with pytest.raises(WorkerMismatchError, match=f"worker {len(sizes) - 1}"):
            one.wait()
        with pytest.raises(WorkerMismatchError):
            one.wait()
        assert one.is_completed()

    on_workers(len(sizes), work)


@pytest.mark.kills("torch_shared_memory_of_a_lost_worker")
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_worker_that_ends_is_noticed_at_once(size):
    def work(memory, index):
        if index == 2:
            return
        began = time.monotonic()
        one = memory.start(torch.ones(size))
        with pytest.raises(RuntimeError, match="Connection closed: worker"):
            one.wait()
        assert one.is_completed() and time.monotonic() - began < 20

    on_workers(3, work)


def test_a_worker_that_does_not_come():
    ended = threading.Barrier(2)

    def work(memory, index):
        if index == 0:
            one = memory.start(torch.ones(3))
            assert not one.is_completed()
            with pytest.raises(RuntimeError, match=r"Timed out after 1 s\."):
                one.wait()
            assert one.is_completed()
        ended.wait(SECONDS)

    on_workers(2, work, seconds=1.0)


@pytest.mark.kills("torch_shared_memory_adds_twice_after_ctrl_c")
@pytest.mark.parametrize("late", ["start", "wait"])
def test_ctrl_c_while_waiting_changes_no_sum(late):
    def interrupt():
        raise KeyboardInterrupt

    def work(memory, index):
        tensor = torch.full((100_000,), float(index))
        if index == 2 and late == "start":
            time.sleep(1.5)
        one = memory.start(tensor)
        if index == 2 and late == "wait":
            time.sleep(1.5)
        if index == 0:
            memory.check_others = interrupt
            with pytest.raises(KeyboardInterrupt):
                one.wait()
            memory.check_others = lambda: None
        one.wait()
        return tensor

    assert all(torch.equal(tensor, torch.full((100_000,), 3.0)) for tensor in on_workers(3, work))


def test_tensors_that_must_use_gloo():
    def work(memory, index):
        assert memory.start(torch.ones(shared_memory._SLOT // 4 + 1)) is None
        assert memory.start(torch.ones(4, 4).t()[:2]) is None
        assert memory.start(torch.ones(3, dtype=torch.bool)) is None

    on_workers(2, work)


@pytest.mark.kills("torch_shared_memory_of_two_machines")
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
        return Offer(types.SimpleNamespace(worker_index=0, num_workers=count), is_wanted).description

    assert offer(2) and offer(16)
    assert offer(1) is offer(17) is offer(2, False) is None
