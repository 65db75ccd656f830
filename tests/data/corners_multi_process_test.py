"""Corner cases of datasets: infinite generators, reused buffers, differences between workers, threads."""

from __future__ import annotations

import gc
import queue
import random
import sys
import threading

import numpy as np
import pytest

from tests.data.fit_multi_process_test import LIMIT, new_model
from tests.helpers.data import in_batches, loader, make_data, py_dataset
from tests.helpers.processes import each_backend, run, strategy
from tests.helpers.scripts import Script


def numbers(batches):
    """Returns the first number of each local batch of a distributed dataset."""
    import keras

    return [keras.ops.convert_to_numpy(batch)[:, 0].tolist() for batch in batches]


def rows_of(number, rows=2):
    return np.full((rows, 3), number, "float32"), np.zeros((rows, 1), "float32")


def in_worker_generator_goes_on():
    used = []

    def endless():
        number = 0
        while True:
            used.append(number)
            yield rows_of(number)
            number += 1

    generator = endless()
    dataset = strategy().experimental_distribute_dataset(generator)
    model = new_model()
    model.fit(dataset, steps_per_epoch=3, epochs=2, verbose=0)
    after_fit = len(used)
    model.evaluate(dataset, steps=2, verbose=0)
    gc.collect()
    return after_fit, float(next(generator)[0][0, 0])


@each_backend
def test_a_generator_goes_on_where_it_was_left(backend):
    assert run(backend, 2, in_worker_generator_goes_on) == [(6, 8.0)] * 2


def in_worker_reused_buffer(rows):
    def refilling():
        memory = np.zeros(rows * 3 + 16, "float32")
        start = -memory.ctypes.data % 64 // memory.itemsize  # JAX could use it without a copy
        buffer = memory[start : start + rows * 3].reshape(rows, 3)
        for number in range(6):
            buffer[:] = number
            yield buffer

    import kdist

    options = kdist.InputOptions(experimental_per_replica_buffer_size=3)
    return numbers(strategy().experimental_distribute_dataset(refilling, options))


@pytest.mark.kills(data_buffer_not_copied="[torch]", data_whole_batch_not_copied="[jax]")
@each_backend
def test_a_buffer_may_be_filled_again(backend):
    assert run(backend, 2, in_worker_reused_buffer, 2) == [[[float(n)] for n in range(6)]] * 2
    # With an odd number of rows, every worker keeps the whole batch on the host.
    larger, smaller = run(backend, 2, in_worker_reused_buffer, 3)
    assert larger == [[float(n)] * 2 for n in range(6)] and smaller == [[float(n)] for n in range(6)]


def in_worker_unseeded_shuffle(kind):
    """Returns the rows that this worker trains on if the workers have different seeds."""
    import keras

    x = np.arange(12, dtype="float32")[:, None] * np.ones((12, 3), "float32")
    y = np.zeros((12, 1), "float32")
    random.seed(strategy().runtime.worker_index)
    seen = []

    def shuffled():
        import torch

        torch.manual_seed(strategy().runtime.worker_index)
        return loader(x, y, batch_size=4, shuffle=True)

    # Six batches, because with three, two workers may have the same order by chance.
    kinds = {"PyDataset": lambda: py_dataset(in_batches(x, y, (2,) * 6)), "DataLoader": shuffled}
    from kdist.data.agreement import Step

    as_batch = Step.as_batch

    def note(step, runtime):
        seen.append(keras.ops.convert_to_numpy(step.batch.parts[0][0])[:, 0].tolist())
        return as_batch(step, runtime)

    Step.as_batch = note
    try:
        new_model_without_seed().fit(kinds[kind](), verbose=0)
    finally:
        Step.as_batch = as_batch
    return seen


def new_model_without_seed():
    """Calls `new_model` without a change of the random state."""
    state = random.getstate()
    model = new_model()
    random.setstate(state)
    return model


@pytest.mark.kills(data_seed_not_shared="[DataLoader-torch]")
@each_backend
@pytest.mark.parametrize("kind", ["PyDataset", "DataLoader"])
def test_workers_shuffle_alike_without_a_seed(backend, kind):
    first, second = run(backend, 2, in_worker_unseeded_shuffle, kind)
    assert sorted(row for step in first + second for row in step) == [float(n) for n in range(12)]
    if kind == "PyDataset":  # its batches stay together, in any order
        for (mine,), (theirs,) in zip(first, second, strict=True):
            assert mine % 2 == 0 and theirs == mine + 1


def in_worker_position_after_fit(kind):
    import keras

    batches = in_batches(*make_data(12), (4, 4, 4))
    data = {"list": batches, "PyDataset": py_dataset(batches, 2)}[kind]
    dataset = strategy().experimental_distribute_dataset(data)
    new_model().fit(dataset, epochs=2, verbose=0)
    state = dataset.get_state()
    again = strategy().experimental_distribute_dataset(data)
    again.set_state({"epoch": 1, "step": 3})
    model = new_model()
    model.fit(again, verbose=0)
    return state, int(keras.ops.convert_to_numpy(model.optimizer.iterations)), again.get_state()


@each_backend
@pytest.mark.parametrize("kind", ["list", "PyDataset"])
def test_the_position_after_an_epoch_of_fit(backend, kind):
    for state, steps, end in run(backend, 2, in_worker_position_after_fit, kind):
        assert state == {"epoch": 2, "step": 0, "pipelines": 1}
        assert steps == 3
        assert end == {"epoch": 3, "step": 0, "pipelines": 1}


def in_worker_prepared_in_time():
    import keras

    class Prepared(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def on_epoch_begin(self):
            self.x, self.y = make_data(12)

        def __getitem__(self, index):
            return self.x[4 * index : 4 * index + 4], self.y[4 * index : 4 * index + 4]

    with strategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])  # not built, so that `fit` looks at a batch first
        model.compile("sgd", "mse")
    history = model.fit(Prepared(), epochs=2, verbose=0).history["loss"]
    return history, model.evaluate(Prepared(), verbose=0)


@each_backend
def test_a_py_dataset_that_prepares_its_batches_when_an_epoch_begins(backend):
    (history, loss), other = run(backend, 2, in_worker_prepared_in_time)
    assert len(history) == 2 and history[0] > history[1] > loss
    assert other == (history, loss)


def in_worker_stop_early():
    import keras

    x, y = make_data(24)
    batches = in_batches(x, y, (4,) * 6)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    gc.disable()
    try:
        dataset = strategy().experimental_distribute_dataset(batches)
        new_model().fit(dataset, verbose=0, callbacks=[Stop()])
        new_model().fit((batch for batch in batches), steps_per_epoch=2, verbose=0)
        for _ in dataset:
            break
        names = [thread.name for thread in threading.enumerate()]
    finally:
        gc.enable()
    return names.count("kdist prefetch")


@each_backend
def test_no_thread_is_left_after_an_early_end(backend):
    assert run(backend, 2, in_worker_stop_early) == [0, 0]


# The process ends while one pipeline waits for space, one reads forever, and one needs no thread.
UNFINISHED = """
import itertools, threading
import numpy as np
import kdist

class Batches:
    def __init__(self, numbers):
        self.numbers = numbers
    def __iter__(self):
        for _ in self.numbers:
            yield np.ones((4, 2))
        threading.Event().wait()

strategy = kdist.MultiWorkerMirroredStrategy()
datasets = Batches(itertools.count()), Batches([1, 2]), iter(Batches(itertools.count()))
iterators = [iter(strategy.experimental_distribute_dataset(dataset)) for dataset in datasets]
print([next(iterator).shape[0] for iterator in iterators])
"""


@pytest.mark.kills(data_not_closed_at_exit="[torch]")
@each_backend
def test_a_process_can_end_with_unfinished_iterators(backend, tmp_path):
    # Not forked, because forks of tests do not delete the modules.
    script = Script(tmp_path, "unfinished", UNFINISHED, {"KERAS_BACKEND": backend}, [sys.executable]).finish()
    assert script.stdout() == "[4, 4, 4]\n"
    assert "Traceback" not in script.stderr()


def in_worker_differ(what):
    import time

    import kdist

    index = strategy().runtime.worker_index
    ((x, y),) = in_batches(*make_data(4), (4,))
    own = {
        "dtype": [(x, y.astype("int32") if index else y)],
        "structure": [(x, y, np.ones(4)) if index else (x, y)],
        # Worker 1 has ended while worker 0 still has a row of objects, which cannot be sent.
        "unsendable": [(x, y)] if index else [(x, y), (np.array([[object()] * 3], object), y[:1])],
        "exit": lambda: leave(index, (x, y)),
    }[what]
    model = new_model()
    began = time.monotonic()
    with pytest.raises((kdist.errors.KdistError, SystemExit)) as caught:
        model.fit(strategy().distribute_datasets_from_function(lambda _: own), verbose=0)
    return str(caught.value), time.monotonic() - began


def leave(index, batch):
    yield batch
    if index:
        raise SystemExit(3)
    yield batch


@each_backend
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dtype", "have different structures or dtypes"),
        ("structure", "have different structures or dtypes"),
        ("unsendable", "orker 0 "),
        ("exit", "worker 1 failed in step 2: SystemExit: 3"),
    ],
)
def test_workers_that_differ_get_an_error(backend, what, words):
    for message, seconds in run(backend, 2, in_worker_differ, what):
        assert words in message
        assert seconds < LIMIT


def in_worker_small_first_file():
    import keras

    import kdist

    class Files:
        def __init__(self):
            self.files = [[0], [1, 2, 3], [4], [5]]

        def __iter__(self):
            return (np.array(file) for file in self.files)

    options = kdist.InputOptions(auto_shard_policy=kdist.AutoShardPolicy.FILE)
    return [
        keras.ops.convert_to_numpy(part).tolist()
        for part in strategy().experimental_distribute_dataset(Files(), options)
    ]


@each_backend
def test_a_first_file_that_is_smaller_than_the_replicas(backend):
    first, second = run(backend, 2, in_worker_small_first_file)
    assert sorted(n for step in first + second for n in step) == list(range(6))


# TensorFlow's iterators, which may take seconds to close ---------------------------------------------------------


def in_worker_dropped_iterator():
    """Returns the threads that close a pipeline's iterator, after a source's reader and an epoch of `fit`."""
    import keras
    import tensorflow as tf

    from kdist.data.sources import tf_data

    dropped_by = queue.Queue()

    class Native:
        def __init__(self, iterator):
            self.iterator = iterator

        def __next__(self):
            return next(self.iterator)

        def __del__(self):
            dropped_by.put(threading.current_thread().name)

    real = tf_data._Iterator.__init__
    tf_data._Iterator.__init__ = lambda self, native: real(self, Native(native))
    try:
        batches = tf_data.TFDataSource(tf.data.Dataset.range(4).batch(2)).batches(0)
        first = next(batches).numpy().tolist()
        batches.close()
        del batches
        dropped = [dropped_by.get(timeout=60)]
        if keras.backend.backend() == "tensorflow":
            new_model().fit(*make_data(22), epochs=1, verbose=0)
            dropped.append(dropped_by.get(timeout=60))
        return first, set(dropped)
    finally:
        tf_data._Iterator.__init__ = real


@pytest.mark.kills(dropped_iterator_waited_for="[torch]")
@each_backend
def test_nobody_waits_for_an_iterator_that_is_dropped(backend):
    assert run(backend, 1, in_worker_dropped_iterator) == [([0, 1], {"kdist lets an iterator go"})]


def in_worker_hooks_at_the_end_of_an_epoch():
    import keras

    from kdist.data.sources.py_dataset import PyDatasetSource

    class Growing(keras.utils.PyDataset):
        epoch = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((1, 1), 10 * self.epoch + index)

        def on_epoch_end(self):
            self.epoch += 1

    source = PyDatasetSource(Growing())
    return [int(batch[0, 0]) for batch in [*source.batches(0, start=2), *source.batches(1)]]


@pytest.mark.kills("data_hooks_of_a_finished_epoch_left_out")
def test_an_epoch_that_resumes_at_its_end_calls_the_hooks_of_the_dataset():
    assert run("torch", 1, in_worker_hooks_at_the_end_of_an_epoch) == [[10, 11]]
