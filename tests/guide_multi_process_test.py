"""The examples of TensorFlow's guide to distributed training, and of its API page, that train with `fit`.

Adapted from https://www.tensorflow.org/guide/distributed_training ("Using tf.distribute.Strategy with
tf.keras.Model.fit") and https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy,
with `tf.distribute` replaced by `kdist` and `tf.keras` by `keras`. `input_shape=` is spelled `keras.Input`.
Each runs with a strategy and without one, and gives equal losses. Where the guide has rows of ones, these
differ: a row that is lost, doubled or swapped shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes import each_backend, run


def rows():
    draw = np.random.RandomState(8)
    return draw.rand(100, 1).astype("float32"), draw.rand(100, 1).astype("float32")


def dataset_of(batch_size):
    """The guide's dataset, which Keras understands on every backend."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(rows()).batch(batch_size)


def scope_of(strategy):
    import contextlib

    return contextlib.nullcontext() if strategy is None else strategy.scope()


def new_strategy(name):
    """The strategies of the guide, on the CPU; `None` is the same code without one."""
    import kdist

    return {
        "none": lambda: None,
        "default": kdist.get_strategy,
        "mirrored": kdist.MirroredStrategy,  # as the guide writes it: all devices there are
        "mirrored of two": lambda: kdist.MirroredStrategy(devices=["/cpu:0", "/cpu:1"]),
        "with cross_device_ops": lambda: kdist.MirroredStrategy(
            ["cpu:0", "cpu:1"], cross_device_ops=kdist.HierarchicalCopyAllReduce()
        ),
        "one device": lambda: kdist.OneDeviceStrategy(device="/cpu:0"),
        "multi-worker": kdist.MultiWorkerMirroredStrategy,
        "experimental": kdist.experimental.MultiWorkerMirroredStrategy,
        "experimental, RING": lambda: kdist.experimental.MultiWorkerMirroredStrategy(
            kdist.experimental.CollectiveCommunication.RING
        ),
    }[name]()


def fit_with_a_dataset(name):
    import keras

    keras.utils.set_random_seed(1)
    mirrored_strategy = new_strategy(name)

    with scope_of(mirrored_strategy):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    # Outside of the scope, as in the guide.
    model.compile(loss="mse", optimizer="sgd")

    dataset = dataset_of(10)
    history = model.fit(dataset, epochs=2, verbose=0)
    return [*history.history["loss"], model.evaluate(dataset, verbose=0)]


def fit_with_numpy(name):
    import keras

    keras.utils.set_random_seed(2)
    mirrored_strategy = new_strategy(name)

    with scope_of(mirrored_strategy):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    model.compile(loss="mse", optimizer="sgd")

    inputs, targets = rows()
    history = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)
    return [*history.history["loss"], model.evaluate(inputs, targets, verbose=0)]


def global_batch_size(name):
    import keras

    keras.utils.set_random_seed(3)
    mirrored_strategy = new_strategy(name)
    replicas = mirrored_strategy.num_replicas_in_sync if mirrored_strategy is not None else 2

    # Compute global batch size using number of replicas.
    BATCH_SIZE_PER_REPLICA = 5
    global_batch_size = BATCH_SIZE_PER_REPLICA * replicas
    dataset = dataset_of(global_batch_size)

    LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15}
    learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

    with scope_of(mirrored_strategy):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(learning_rate))
    history = model.fit(dataset, epochs=2, verbose=0)
    assert len(dataset) == 100 // global_batch_size
    return history.history["loss"]


def multi_worker(name):
    """The API page's model, with plain arrays."""
    import keras

    keras.utils.set_random_seed(4)
    strategy = new_strategy(name)

    with scope_of(strategy):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)

    random = np.random.RandomState(0)
    x = random.random_sample((20, 5)).astype(np.float32)
    y = random.randint(2, size=(20, 2)).astype(np.float32)

    model.compile(optimizer, loss="mse")
    history = model.fit(x, y, batch_size=2, epochs=2, verbose=0)
    return [*history.history["loss"], model.evaluate(x, y, batch_size=2, verbose=0)]


MIRRORED = ("default", "one device", "mirrored", "mirrored of two", "with cross_device_ops")
MULTI_WORKER = ("multi-worker", "experimental", "experimental, RING")


def results_of(example, names):
    return {name: example(name) for name in names}


@each_backend
@pytest.mark.parametrize("example", [fit_with_a_dataset, fit_with_numpy], ids=lambda f: f.__name__)
def test_mirrored(backend, example):
    results = run(backend, 1, results_of, example, ("none", *MIRRORED))[0]
    for name in MIRRORED:
        assert results[name] == pytest.approx(results["none"], rel=1e-5), name
    assert results["none"][0] > results["none"][-1] > 0


@each_backend
def test_global_batch_size(backend):
    results = run(backend, 1, results_of, global_batch_size, ("none", "mirrored of two"))[0]
    assert results["mirrored of two"] == pytest.approx(results["none"], rel=1e-5)


@each_backend
@pytest.mark.parametrize(
    "example", [fit_with_a_dataset, fit_with_numpy, multi_worker], ids=lambda f: f.__name__
)
def test_multi_worker(backend, example):
    expected = run(backend, 1, example, "none")[0]
    for results in run(backend, 2, results_of, example, MULTI_WORKER):
        for name in MULTI_WORKER:
            assert results[name] == pytest.approx(expected, rel=1e-5), name


@each_backend
def test_multi_worker_strategy_of_one_worker(backend):
    results = run(backend, 1, results_of, multi_worker, ("none", *MULTI_WORKER))[0]
    for name in MULTI_WORKER:
        assert results[name] == pytest.approx(results["none"], rel=1e-5), name


def with_a_dataset_fn(name):
    """The API page's `dataset_fn`. Its dataset has no end, so `fit` is told when an epoch does."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(5)
    strategy = new_strategy(name)

    with scope_of(strategy):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)

    def dataset_fn(ctx):
        random = np.random.RandomState(ctx.input_pipeline_id)
        x = random.random_sample((2, 5)).astype(np.float32)
        y = random.randint(2, size=(2, 1))
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.repeat().batch(1, drop_remainder=True)

    if strategy is None:  # both workers' pipelines on one device
        from kdist import InputContext

        both = [dataset_fn(InputContext(2, i, 2)).as_numpy_iterator() for i in range(2)]
        pairs = zip(*both, strict=True)
        dist_dataset = (tuple(np.concatenate(parts) for parts in zip(*pair, strict=True)) for pair in pairs)
    else:
        dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model.fit(dist_dataset, epochs=2, steps_per_epoch=10, verbose=0).history["loss"]


@each_backend
def test_the_dataset_fn_of_the_api_page(backend):
    expected = run(backend, 1, with_a_dataset_fn, "none")[0]
    for losses in run(backend, 2, with_a_dataset_fn, "multi-worker"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[1] != losses[0]


def input_of_the_guide():
    """ "Using tf.distribute.Strategy with custom training loops": what comes before the loop."""
    import keras

    import kdist

    mirrored_strategy = kdist.MirroredStrategy(["/cpu:0", "/cpu:1"])
    global_batch_size = 5 * mirrored_strategy.num_replicas_in_sync

    dataset = dataset_of(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    seen = [mirrored_strategy.experimental_local_results(dist_inputs) for dist_inputs in dist_dataset]
    iterator = iter(dist_dataset)
    seen += [mirrored_strategy.experimental_local_results(next(iterator)) for _ in range(10)]

    numpy_dataset = mirrored_strategy.make_experimental_numpy_dataset(rows())
    for dist_inputs in mirrored_strategy.experimental_distribute_dataset(numpy_dataset.batch(10)):
        seen.append(mirrored_strategy.experimental_local_results(dist_inputs))
    return keras.tree.map_structure(keras.ops.convert_to_numpy, seen)


@each_backend
def test_the_input_of_the_guides_custom_loop(backend):
    seen = run(backend, 1, input_of_the_guide)[0]
    x, y = rows()
    assert len(seen) == 10 + 10 + 10
    for number, replicas in enumerate(seen):
        assert len(replicas) == 2
        for i, (replica_x, replica_y) in enumerate(replicas):
            first = (
                10 * (number % 10) + 5 * i
            )  # the order of the dataset, the first rows to the first replica
            np.testing.assert_array_equal(replica_x, x[first : first + 5])
            np.testing.assert_array_equal(replica_y, y[first : first + 5])
