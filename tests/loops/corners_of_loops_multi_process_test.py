"""Loops in compiled functions: without a batch, left early, in several threads, and in `torch.compile`."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import each_backend, run, strategy
from tests.loops.clusters import each_cluster, on_workers
from tests.loops.datasets import still_reading


def in_worker_empty(num_replicas):
    import keras

    s = strategy(num_replicas)
    epochs = []

    def later():
        epochs.append("begun")
        return iter([np.ones((6, 1), "float32")] * (len(epochs) > 2))

    @kdist.function
    def total(batches):
        sums = keras.ops.zeros(())
        for batch in batches:
            sums = sums + s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)
        return sums

    empty = s.experimental_distribute_dataset([])
    found = [float(total(empty)) for _ in range(2)]
    assert empty.get_state() == {"epoch": 2, "step": 0, "pipelines": 1}
    ended = iter(s.experimental_distribute_dataset([np.ones((6, 1), "float32")]))
    next(ended)

    @kdist.function
    def of_ended():
        sums = keras.ops.zeros(())
        for batch in ended:
            sums = sums + s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)
        return sums

    found += [float(of_ended()) for _ in range(2)]
    changing = s.experimental_distribute_dataset(later)
    found += [float(total(changing)) for _ in range(2)]
    try:
        found.append(float(total(changing)))
    except kdist.errors.DatasetError as error:
        found.append(str(error))
    return found


@pytest.mark.kills(function_loops_skip_what_comes_later="tensorflow")
@each_cluster
def test_a_loop_without_a_batch_does_nothing(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_empty):
        *nothing, last = found
        assert nothing == [0] * 6
        assert "was empty when" in last if backend == "tensorflow" else last == 6


def in_worker_left(num_replicas):
    import gc
    import threading

    import keras

    before = set(threading.enumerate())  # threads of other tests may still run in kept workers
    s = strategy(num_replicas)
    dataset = s.experimental_distribute_dataset(lambda: (np.ones((6, 1), "float32") for _ in range(99)))

    @kdist.function
    def first(dataset):
        count = keras.ops.zeros(())
        for batch in dataset:
            count = count + s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)
            if count > 0:
                break
        return count

    found = [float(first(dataset)) for _ in range(2)]
    gc.collect()
    return found, still_reading(before)


@pytest.mark.kills(function_loops_not_ended="tensorflow")
@each_cluster
def test_a_loop_that_is_left_leaves_nothing(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_left):
        assert found == ([6, 6], [])


def in_worker_two_threads(num_replicas):
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import keras

    s = strategy(num_replicas)
    meetings = []

    def batches():
        yield np.ones((6, 1), "float32")
        for meeting in meetings:
            meeting.wait(20)  # until the other thread has also begun
        yield np.ones((6, 1), "float32")

    dataset = s.experimental_distribute_dataset(batches)

    @kdist.function
    def total(dataset):
        sums = keras.ops.zeros(())
        for batch in dataset:
            sums = sums + keras.ops.sum(s.reduce("SUM", batch, axis=None))
        return sums

    alone = float(total(dataset))
    meetings.append(threading.Barrier(2))
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(total, dataset) for _ in range(2)]
        return alone, [float(future.result()) for future in futures]


@each_backend
def test_two_threads_loop_each_for_itself(backend):
    assert run(backend, 1, in_worker_two_threads, 2)[0] == (12, [12, 12])


def in_worker_steps_of_threads(num_replicas):
    from concurrent.futures import ThreadPoolExecutor

    import keras

    s = strategy(num_replicas)
    with s.scope():
        counts = [keras.Variable(0.0, trainable=False, aggregation="sum") for _ in range(3)]

    def count(variable):
        def step():
            variable.assign_add(1.0)
            kdist.get_replica_context().all_reduce("SUM", 1.0)  # the other replica runs, or another thread

        for _ in range(15):
            s.run(step)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(count, counts))
    return [float(variable.value) for variable in counts]


@pytest.mark.kills("torch_steps_of_threads_overlap")
def test_steps_of_several_threads_take_turns():
    assert run("torch", 1, in_worker_steps_of_threads, 2)[0] == [30] * 3


def in_worker_large_integers(num_replicas):
    s = strategy(num_replicas)

    def doubled(number):
        numbers = s.experimental_distribute_values_from_function(lambda context: number)
        return int(s.experimental_local_results(s.run(lambda x: x * 2, args=(numbers,)))[1])

    with pytest.raises(OverflowError):
        doubled(2**31)
    return doubled(2**30 - 1)


@pytest.mark.kills("jax_large_integers_wrap_around")
def test_integers_that_jax_cannot_represent_are_an_error():
    assert run("jax", 1, in_worker_large_integers, 2) == [2**31 - 2]


def in_worker_torch_compile(num_replicas):
    import sys

    import keras
    import torch

    s = strategy(num_replicas)
    dataset = s.experimental_distribute_dataset([np.full((6, 1), n, "float32") for n in (1, 2, 3)])
    ignored = []
    sys.unraisablehook, hook = ignored.append, sys.unraisablehook

    def total(batch):
        return s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)

    def step(iterator):
        return total(next(iterator))

    def epoch(dataset):
        sums = keras.ops.zeros(())
        for batch in dataset:
            sums = sums + total(batch)
        return sums

    found = []
    try:
        for compiled in (
            lambda fn: torch.compile(fn, backend="eager"),
            lambda fn: kdist.function(fn, jit_compile=True, backend="eager"),
        ):
            iterator, compiled_step = iter(dataset), compiled(step)
            found += [float(compiled_step(iterator)) for _ in range(3)]
            with pytest.raises((StopIteration, kdist.errors.OutOfRangeError)):
                compiled_step(iterator)
            found.append(float(compiled(epoch)(dataset)))
    finally:
        sys.unraisablehook = hook
        torch._dynamo.reset()
    return found, [str(error.exc_value) for error in ignored]


def test_torch_compile_reads():
    assert run("torch", 1, in_worker_torch_compile, 2)[0] == ([6, 12, 18, 36] * 2, [])


def tensors_of_pytorch():
    """Uses PyTorch tensors of a dtype that NumPy does not have, as an argument and as rows."""
    import keras
    import torch

    own = strategy()
    tensor = torch.arange(4, dtype=torch.bfloat16)
    loader = torch.utils.data.DataLoader(torch.arange(8.0).to(torch.bfloat16), batch_size=4)
    dataset = own.experimental_distribute_dataset(loader)

    def total(batch):
        return keras.ops.sum(keras.ops.cast(batch, "float32"))

    argument = own.reduce("MEAN", own.run(total, args=(tensor,)), axis=None)
    rows = [own.reduce("SUM", own.run(total, args=(batch,)), axis=None) for batch in dataset]
    return float(argument), [float(row) for row in rows], str(tensor.dtype)


@pytest.mark.kills(jax_converts_tensors_by_itself="[jax]")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_tensors_of_pytorch_are_taken_whatever_their_dtype(backend):
    assert run(backend, 1, tensors_of_pytorch) == [(6.0, [6.0, 22.0], "torch.bfloat16")]
