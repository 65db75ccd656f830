"""Reading from datasets inside compiled functions: the number of traces, the memory, and the errors."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, each_cluster_of, on_workers
from tests.loops.datasets import BATCH, STEPS, dataset_of, rows, still_reading

# Iterators of one dataset share compiled functions ----------------------------------------------------------


def in_worker_traces(num_replicas):
    s = strategy(num_replicas)
    dataset = dataset_of("generator", s)
    traces = []

    @kdist.function
    def rows_of(iterator):
        traces.append("trace")
        part = s.experimental_local_results(next(iterator)[1])[0]
        return part.shape[0] if part.shape[0] is not None else part

    for _ in range(3):
        iterator = iter(dataset)
        for _ in range(STEPS):
            rows_of(iterator)
    return len(traces)


@each_cluster_of("tensorflow")
def test_another_epoch_is_not_traced_anew(backend, num_workers, num_replicas):
    traces = on_workers(backend, num_workers, num_replicas, in_worker_traces)
    assert max(traces) <= 2


def in_worker_break(num_replicas):
    import keras

    s = strategy(num_replicas)
    dataset = dataset_of("generator", s)

    @kdist.function
    def first(dataset, number):
        total = keras.ops.zeros(())
        count = keras.ops.zeros(())
        for _, y in dataset:
            total = total + s.reduce("SUM", s.run(keras.ops.sum, args=(y,)), axis=None)
            count = count + 1
            if count >= number:
                break
        return total

    return [float(first(dataset, number)) for number in (2.0, 3.0, 2.0)]


@each_cluster
def test_a_loop_that_breaks_begins_anew(backend, num_workers, num_replicas):
    _, y = rows()
    expected = [sum(y[: n * BATCH]) for n in (2, 3, 2)]
    for found in on_workers(backend, num_workers, num_replicas, in_worker_break):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def in_worker_lengths(num_replicas):
    import tensorflow as tf

    s = strategy(num_replicas)
    sentences = tf.data.Dataset.range(1, 9).map(lambda n: tf.fill([n], n)).padded_batch(4)
    dataset = s.experimental_distribute_dataset(sentences)

    @kdist.function
    def totals(dataset):
        found = tf.zeros([2], tf.int64)
        for batch in dataset:
            total = s.reduce("SUM", s.run(tf.reduce_sum, args=(batch,)), axis=None)
            found = tf.stack([found[1], total])
        return found

    return totals(dataset).numpy()


@each_cluster_of("tensorflow")
def test_a_pipeline_says_which_lengths_differ(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_lengths):
        np.testing.assert_array_equal(found, [1 + 4 + 9 + 16, 25 + 36 + 49 + 64])


# Errors -----------------------------------------------------------------------------------------------------


def in_worker_refusals(num_replicas):
    import keras

    s = strategy(num_replicas)
    dataset = dataset_of("generator", s)
    refused = kdist.errors.StrategyScopeError

    def unseen(iterable):
        total = 0.0
        for _ in iterable:
            total += 1.0
        return total

    if keras.backend.backend() == "tensorflow":
        for iterable in (dataset, iter(dataset)):
            with pytest.raises(refused, match="AutoGraph"):
                kdist.function(unseen, autograph=False)(iterable)
    else:
        assert kdist.function(unseen)(dataset) == STEPS

    lengths = iter([3, 5])
    uneven = s.experimental_distribute_dataset(lambda: (np.zeros((4, n), "float32") for n in lengths))
    iterator = iter(uneven)

    @kdist.function
    def total(iterator):
        return s.reduce("SUM", s.run(lambda x: keras.ops.sum(x), args=(next(iterator),)), axis=None)

    assert float(total(iterator)) == 0
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(kdist.errors.DatasetError, match="inner shapes"):
            total(iterator)
    else:
        assert float(total(iterator)) == 0
    return True


@each_cluster
def test_what_a_graph_cannot_do_is_an_error(backend, num_workers, num_replicas):
    assert all(on_workers(backend, num_workers, num_replicas, in_worker_refusals))


def in_worker_failing_dataset(num_replicas):
    s = strategy(num_replicas)

    def broken():
        yield np.ones((4, 1), "float32")
        raise LookupError("no more rows")

    iterator = iter(s.experimental_distribute_dataset(broken))

    @kdist.function
    def step(iterator):
        return s.run(lambda x: x, args=(next(iterator),))

    step(iterator)
    with pytest.raises(kdist.errors.DatasetError, match="no more rows"):
        step(iterator)
    return True


@each_cluster
def test_an_error_in_the_data_comes_out(backend, num_workers, num_replicas):
    assert all(on_workers(backend, num_workers, num_replicas, in_worker_failing_dataset))


# Corners ----------------------------------------------------------------------------------------------------


def in_worker_corners(num_replicas):
    import gc
    import pickle
    import threading
    import weakref

    import keras

    before = set(threading.enumerate())

    s = strategy(num_replicas)
    on_tensorflow = keras.backend.backend() == "tensorflow"
    out_of_range = kdist.errors.OutOfRangeError

    def total(batch):
        return s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)

    # The first call does not take the branch that reads the dataset.
    weight = keras.Variable(1.0)
    iterator = iter(s.experimental_distribute_dataset([np.full((4, 1), n, "float32") for n in (1, 2, 3)]))

    @kdist.function
    def late(reads):
        def loss():
            return total(next(iterator)) * weight if reads else weight * 1.0

        return kdist.value_and_grad(loss, [weight])()[0]

    if not on_tensorflow:  # a TensorFlow tape cannot look into a `run`
        assert [float(late(reads)) for reads in (False, True, True)] == [1, 4, 8]
    # A replica cannot read the next global batch.
    with pytest.raises(kdist.errors.StrategyScopeError, match="inside a replica"):
        s.run(lambda: keras.ops.sum(s.experimental_local_results(next(iterator))[0]))
    # The first call of a function receives an iterator that has already ended.
    short = s.experimental_distribute_dataset([np.ones((4, 1), "float32")])

    @kdist.function
    def step(iterator):
        return total(next(iterator))

    ended = iter(short)
    next(ended)
    for _ in range(2):
        with pytest.raises(out_of_range) as caught:
            step(ended)
        assert "ended" in caught.value.problem and type(pickle.loads(pickle.dumps(caught.value))) is type(
            caught.value
        )
        for _ in ended:
            raise AssertionError
    assert float(step(iter(short))) == 4
    # Nothing keeps a deleted dataset, or its threads.
    dataset = s.experimental_distribute_dataset(lambda: (np.ones((4, 1), "float32") for _ in range(99)))

    @kdist.function
    def first(dataset):
        count = keras.ops.zeros(())
        for batch in dataset:
            count = count + total(batch)
            if count > 0:
                break
        return count

    assert float(first(dataset)) == 4
    gone = weakref.ref(dataset)
    del dataset, first
    gc.collect()
    if on_tensorflow and s.runtime.num_workers > 1:
        return []  # TensorFlow keeps graphs that reduce over workers, and so the unfinished iterator
    assert gone() is None
    return still_reading(before)


@each_cluster
def test_corners(backend, num_workers, num_replicas):
    for threads in on_workers(backend, num_workers, num_replicas, in_worker_corners):
        assert threads == []


def in_worker_kinds(num_replicas):
    import tensorflow as tf

    s = strategy(num_replicas)
    traces = []

    def replica_step(named):
        return tf.reduce_sum(named["z"]) + 10 * tf.reduce_sum(named["a"])

    @kdist.function
    def step(iterator):
        traces.append("trace")
        named, nothing = next(iterator)
        assert nothing is None
        return s.reduce("SUM", s.run(replica_step, args=(named,)), axis=None)

    totals = []
    for number in range(3):
        z, a = np.full((4, 2), number, "float32"), np.ones((4, 3), "float32")
        data = tf.data.Dataset.from_tensor_slices((z, a)).batch(4)
        data = data.map(lambda z, a: (collections.OrderedDict([("z", z), ("a", a)]), None))
        totals.append(float(step(iter(s.experimental_distribute_dataset(data)))))

    @kdist.function
    def sum_of_a(iterator):
        return s.reduce("SUM", s.run(tf.reduce_sum, args=(next(iterator)["a"],)), axis=None)

    two = iter(s.experimental_distribute_dataset([{name: np.ones((4, 1), "float32")} for name in "ab"]))
    assert float(sum_of_a(two)) == 4
    with pytest.raises(kdist.errors.DatasetError, match="structure"):
        sum_of_a(two)
    return totals, len(traces)


@pytest.mark.kills(function_iterators_traced_anew="[2-replicas-on-1-tensorflow]")
@each_cluster_of("tensorflow")
def test_datasets_of_one_kind_share_what_is_compiled(backend, num_workers, num_replicas):
    for totals, traces in on_workers(backend, num_workers, num_replicas, in_worker_kinds):
        assert totals == [120, 128, 136]
        assert traces <= 2
