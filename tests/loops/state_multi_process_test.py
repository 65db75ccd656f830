"""State inside `Strategy.run`: variables, building of layers, random numbers, statistics, metrics."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import (
    each_cluster,
    each_cluster_of,
    local_results,
    numpy_of,
    on_replicas,
    on_workers,
    per_replica,
)

# Variables --------------------------------------------------------------------------------------------------

AGGREGATIONS = ("sum", "mean", "only_first_replica", "none")


def in_worker_variables(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        variables = {
            (how, dtype): keras.Variable(np.array([5, 7]), dtype=dtype, trainable=False, aggregation=how)
            for how in AGGREGATIONS
            for dtype in ("float32", "int32")
            if (how, dtype) != ("mean", "int32")
        }

    def add(number):
        seen = []
        for variable in variables.values():
            variable.assign_add(keras.ops.cast(number, variable.dtype))
            seen.append(variable.value + 0)  # a replica sees its own write
        return seen

    numbers = per_replica(s, lambda i: np.array([i, 2 * i], "float32"))
    seen = s.run(add, args=(numbers,))
    found = {key: numpy_of(variable.value) for key, variable in variables.items()}
    everywhere = s.run(lambda: [variable.value + 0 for variable in variables.values()])
    return [
        (dict(zip(variables, own, strict=True)), found, dict(zip(variables, later, strict=True)))
        for own, later in zip(local_results(s, seen), local_results(s, everywhere), strict=True)
    ]


@each_cluster
def test_writes_are_aggregated_as_the_variable_says(backend, num_workers, num_replicas):
    ids = range(num_replicas)
    mean = sum(ids) / num_replicas
    old, step = np.array([5, 7]), np.array([1, 2])
    expected = {
        ("sum", "float32"): old + step * sum(ids),
        ("sum", "int32"): old + step * sum(ids),
        ("mean", "float32"): old + step * mean,
        ("only_first_replica", "float32"): old,
        ("only_first_replica", "int32"): old,
        ("none", "float32"): old + step * mean,
        ("none", "int32"): old,
    }
    for i, results in enumerate(on_replicas(backend, num_workers, num_replicas, in_worker_variables)):
        own, after, later = results
        for key, value in expected.items():
            np.testing.assert_allclose(own[key], old + step * i, rtol=1e-6, err_msg=f"own {key}")
            np.testing.assert_allclose(after[key], value, rtol=1e-6, err_msg=f"{key}")
            np.testing.assert_array_equal(later[key], after[key])
            assert later[key].dtype == key[1]


def in_worker_mean_of_integers(num_replicas):
    import keras

    s = strategy(num_replicas)
    with pytest.raises(ValueError, match=r"(?i)aggregation=.?mean.*floating"):
        with s.scope():  # TensorFlow raises the error here
            counter = keras.Variable(1, dtype="int32", trainable=False, aggregation="mean")
        s.run(lambda: counter.assign_add(2))
    return True


@each_cluster
def test_whole_numbers_have_no_mean(backend, num_workers, num_replicas):
    assert all(on_workers(backend, num_workers, num_replicas, in_worker_mean_of_integers))


def in_worker_more_writes(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        flag = keras.Variable(False, dtype="bool", trainable=False)
        half = keras.Variable(np.float32(1), dtype="float16", trainable=False, aggregation="sum")
        total = keras.Variable(np.zeros((), "float32"), trainable=False, aggregation="sum")
        twice = keras.Variable(np.float32(3), trainable=False, aggregation="mean")
    outside = keras.Variable(np.float32(10), trainable=False)  # created outside of all scopes
    made = {}

    def fn(number):
        if "lazy" not in made:
            made["lazy"] = keras.Variable("ones", shape=(2,), trainable=False, aggregation="sum")
        made["lazy"].assign_add([1.0, 2.0])
        flag.assign(True)
        half.assign_add(0.5)
        total.assign(number)
        twice.assign(twice * 2)
        twice.assign_sub(number)
        outside.assign_add(number)
        return twice.value + 0

    own = s.run(fn, args=(per_replica(s, np.float32),))
    between = [numpy_of(v.value) for v in (flag, half, total, twice, outside, made["lazy"])]
    twice.assign(1.0)  # outside of run
    outside.assign(keras.ops.zeros(()))
    s.run(fn, args=(per_replica(s, np.float32),))
    after = [numpy_of(v.value) for v in (half, twice, outside, made["lazy"])]
    return [(float(part), between, after) for part in local_results(s, own)]


@each_cluster
def test_variables_of_all_kinds_can_be_written(backend, num_workers, num_replicas):
    mean = (num_replicas - 1) / 2
    for i, results in enumerate(on_replicas(backend, num_workers, num_replicas, in_worker_more_writes)):
        own, (flag, half, total, twice, outside, lazy), after = results
        assert own == 6 - i
        assert flag.dtype == "bool" and flag
        assert half == 1 + 0.5 * num_replicas
        assert total == sum(range(num_replicas))
        assert twice == 6 - mean
        assert outside == 10 + mean
        np.testing.assert_array_equal(lazy, [1 + num_replicas, 1 + 2 * num_replicas])
        np.testing.assert_array_equal(after[:2], [1 + num_replicas, 2 - mean])
        assert after[2] == mean
        np.testing.assert_array_equal(after[3], [1 + 2 * num_replicas, 1 + 4 * num_replicas])


def in_worker_kept_values(num_replicas):
    """Keeps variables' values while JAX reuses the buffers; returns each value with its step."""
    import keras

    s = kdist.OneDeviceStrategy("cpu:0") if num_replicas == 1 else strategy(num_replicas)
    with s.scope():
        v = keras.Variable(np.arange(4, dtype="float32"), trainable=False)
        target = keras.Variable(np.zeros(4, "float32"), trainable=False)

    def add():
        v.assign_add([1.0] * 4)
        return v.value

    kept = [(v.value, 0)]
    for step in range(1, 4):
        kept += [(s.experimental_local_results(s.run(lambda: v.value))[-1], step - 1), (v.value, step - 1)]
        result = s.run(add)
        target.assign(v)
        kept += [(s.experimental_local_results(result)[0], step), (keras.ops.convert_to_tensor(v), step)]
        s.run(add)
        kept.append((target.value, step))
        v.assign(v - 1)
    return [(numpy_of(value), step) for value, step in kept]


@each_cluster_of("jax")  # on other backends, kept values change with the variable
def test_values_that_were_taken_stay_what_they_were(backend, num_workers, num_replicas):
    for kept in on_workers(backend, num_workers, num_replicas, in_worker_kept_values):
        assert len(kept) == 16
        for value, step in kept:
            np.testing.assert_array_equal(value, np.arange(4) + step)


@pytest.mark.kills("jax_value_of_one_device_reused")
def test_values_that_were_taken_from_one_device_stay_what_they_were():
    test_values_that_were_taken_stay_what_they_were("jax", 1, 1)


# Layers -----------------------------------------------------------------------------------------------------


def in_worker_lazy_layers(num_replicas):
    import keras

    s = strategy(num_replicas)
    keras.utils.set_random_seed(7)
    with s.scope():
        random = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
        ones = keras.Sequential([keras.layers.Dense(3, kernel_initializer="ones", bias_initializer="ones")])
    x = np.array([[1, 2], [3, 4]], "float32")
    rows = per_replica(s, lambda i: x * (i + 1))
    assert not random.built
    equal = s.run(random, args=(x,))
    outputs = s.run(ones, args=(rows,), kwargs={"training": True})
    assert random.built and len(random.weights) == 4
    assert [tuple(weight.shape) for weight in ones.weights] == [(2, 3), (3,)]
    ones.set_weights([np.full((2, 3), 2.0), np.zeros(3)])
    again = s.run(ones, args=(rows,))
    return list(
        zip(
            local_results(s, equal),
            local_results(s, outputs),
            local_results(s, again),
            [numpy_of(random(x))] * len(s.runtime.devices),  # outside of run, on the same weights
            strict=True,
        )
    )


@each_cluster
def test_layers_are_built_at_the_first_call(backend, num_workers, num_replicas):
    found = on_replicas(backend, num_workers, num_replicas, in_worker_lazy_layers)
    for i, (equal, outputs, again, outside) in enumerate(found):
        np.testing.assert_allclose(equal, found[0][0], rtol=1e-6)
        np.testing.assert_allclose(equal, outside, rtol=1e-6)
        np.testing.assert_allclose(outputs, np.array([[3.0], [7.0]]) * (i + 1) + np.ones((1, 3)))
        np.testing.assert_allclose(again, np.array([[6.0], [14.0]]) * (i + 1) + np.zeros((1, 3)))


def in_worker_random(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        first, second = keras.layers.Dropout(0.5, seed=3), keras.layers.Dropout(0.5, seed=3)
        seeds = keras.random.SeedGenerator(5)
        keras.utils.set_random_seed(1)
        unseeded = keras.layers.Dropout(0.5)

    def fn():
        x = keras.ops.ones((1, 64))
        return {
            "first": first(x, training=True),
            "again": first(x, training=True),
            "second": second(x, training=True),
            "unseeded": unseeded(x, training=True),
            "normal": keras.random.normal((64,), seed=seeds),
            "inference": first(x, training=False),
        }

    return [(a, b) for a, b in zip(local_results(s, s.run(fn)), local_results(s, s.run(fn)), strict=True)]


@each_cluster
def test_replicas_draw_different_random_numbers(backend, num_workers, num_replicas):
    found = on_replicas(backend, num_workers, num_replicas, in_worker_random)
    for name in ("first", "again", "unseeded", "normal"):
        draws = {draw[name].tobytes() for calls in found for draw in calls}
        assert len(draws) == 2 * num_replicas, f"{name}: each replica draws its own, anew in each call"
    for calls in found:
        for draw in calls:
            assert {0.0, 2.0} == set(draw["first"].flat)
            np.testing.assert_array_equal(draw["inference"], np.ones((1, 64)))
            assert not np.array_equal(draw["first"], draw["again"])
        np.testing.assert_array_equal(calls[0]["first"], calls[0]["second"])
    for calls, repeated in zip(
        found, on_replicas(backend, num_workers, num_replicas, in_worker_random), strict=True
    ):
        np.testing.assert_array_equal(calls[1]["normal"], repeated[1]["normal"])
        np.testing.assert_array_equal(calls[0]["unseeded"], repeated[0]["unseeded"])


# Batch normalization ----------------------------------------------------------------------------------------

ROWS = np.random.RandomState(0).randn(12, 2) * 2 + 3
OTHER = np.random.RandomState(1).randn(12, 2)
WEIGHTS = np.random.RandomState(2).randn(12, 2)
EPSILON = 1e-3


def in_worker_batch_normalization(num_replicas, synchronized):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=EPSILON, synchronized=synchronized)
        layer.build((None, 2))
        scale = keras.Variable(np.array([0.5, -1.0], "float32"))

    def rows_of(array):
        size = len(array) // num_replicas
        return per_replica(s, lambda i: array[i * size : (i + 1) * size].astype("float32"))

    def fn(x, other, weights):
        def loss_fn():
            y = layer(x + other * scale, training=True)
            return keras.ops.sum(y * weights), y

        variables = [layer.gamma, layer.beta, scale]
        (_, y), gradients = kdist.value_and_grad(loss_fn, variables, has_aux=True)()
        return y, kdist.get_replica_context().all_reduce("SUM", gradients)

    results = s.run(fn, args=(rows_of(ROWS), rows_of(OTHER), rows_of(WEIGHTS)))
    statistics = numpy_of([layer.moving_mean.value, layer.moving_variance.value])
    return [(*parts, statistics) for parts in local_results(s, results)]


def normalize_by_hand(x, other, weights):
    """Returns outputs, statistics and gradients (gamma, beta, scale) of one normalized batch."""
    mean, variance = x.mean(0), x.var(0)
    deviation = np.sqrt(variance + EPSILON)
    y = (x - mean) / deviation
    d_x = (weights - weights.mean(0) - y * (weights * y).mean(0)) / deviation
    return y, mean, variance, [(weights * y).sum(0), weights.sum(0), (d_x * other).sum(0)]


@pytest.mark.parametrize("synchronized", [False, True])
@each_cluster
def test_batch_normalization_sees_its_replica_or_all(backend, num_workers, num_replicas, synchronized):
    found = on_replicas(backend, num_workers, num_replicas, in_worker_batch_normalization, synchronized)
    x = ROWS + OTHER * [0.5, -1.0]
    parts = 1 if synchronized else num_replicas
    by_hand = [
        normalize_by_hand(*split)
        for split in zip(*(np.split(a, parts) for a in (x, OTHER, WEIGHTS)), strict=True)
    ]
    y, means, variances, gradients = zip(*by_hand, strict=True)
    np.testing.assert_allclose(np.concatenate([f[0] for f in found]), np.concatenate(y), rtol=1e-4, atol=1e-5)
    for _, found_gradients, (moving_mean, moving_variance) in found:
        np.testing.assert_allclose(moving_mean, 0.5 * np.mean(means, 0), rtol=1e-5)
        np.testing.assert_allclose(moving_variance, 0.5 + 0.5 * np.mean(variances, 0), rtol=1e-5)
        for found_one, *own in zip(found_gradients, *gradients, strict=True):
            np.testing.assert_allclose(found_one, np.sum(own, 0), rtol=1e-4, atol=1e-5)
