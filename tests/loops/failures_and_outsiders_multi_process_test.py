"""Variables outside of all scopes, functions that fail in the middle, and variables as Python numbers."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, local_results, numpy_of, on_replicas, on_workers, per_replica

# Variables that were created outside of the scope -----------------------------------------------------------


def in_worker_outsiders(num_replicas):
    import keras

    s = strategy(num_replicas)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[1.0], [-1.0]])])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    metric = keras.metrics.Sum()
    total = keras.Variable(np.float32(5), trainable=False, aggregation="sum")
    last = keras.Variable(np.float32(5), trainable=False, aggregation="only_first_replica")
    dropout = keras.layers.Dropout(0.5, seed=3)

    def step(x):
        def loss_fn():
            return keras.ops.sum(model(x) ** 2) / 2

        _, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(x)
        total.assign_add(x[0, 0])
        last.assign(x[0, 0])
        return dropout(keras.ops.ones((1, 64)), training=True)

    x = per_replica(s, lambda i: np.array([[i + 1, 1]], "float32"))
    compiled = kdist.function(lambda x: s.run(step, args=(x,)))
    masks = [local_results(s, call(x)) for call in (lambda x: s.run(step, args=(x,)), compiled, compiled)]
    state = numpy_of([model.get_weights()[0][:, 0], metric.result(), total.value, last.value])
    numbers = int(optimizer.iterations), float(total), int(last)
    return [([mask[i] for mask in masks], state, numbers) for i in range(len(s.runtime.devices))]


@each_cluster
def test_variables_of_no_scope_are_those_of_all_replicas(backend, num_workers, num_replicas):
    x = np.array([[i + 1.0, 1] for i in range(num_replicas)])
    w, velocity = np.array([1.0, -1.0]), 0
    for _ in range(3):
        velocity = 0.5 * velocity - 0.1 * x.T @ (x @ w)
        w = w + velocity
    found = on_replicas(backend, num_workers, num_replicas, in_worker_outsiders)
    for _, (weights, counted, total, last), numbers in found:
        np.testing.assert_allclose(weights, w, rtol=1e-5)
        assert counted == 3 * x.sum()
        assert total == 5 + 3 * x[:, 0].sum()
        assert last == 1
        assert numbers == (3, total, 1)
    draws = {mask.tobytes() for masks, _, _ in found for mask in masks}
    assert len(draws) == 3 * num_replicas, "each replica draws its own, anew in each call"


def in_worker_numbers(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        optimizer = keras.optimizers.SGD()
        half = keras.Variable(np.float32(2.5))
        vector = keras.Variable(np.ones(2, "float32"))
    for kind in (int, float):
        with pytest.raises(TypeError):
            kind(vector)
    return int(optimizer.iterations), float(half), int(half)


@each_cluster
def test_mirrored_variables_are_python_numbers(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_numbers):
        assert found == (0, 2.5, 2)


def in_worker_other_strategy(num_replicas):
    import keras

    with kdist.MirroredStrategy(["cpu:0"]).scope():
        v = keras.Variable(np.float32(1), trainable=False, name="stranger")
    with pytest.raises(kdist.errors.StrategyScopeError, match="another strategy") as caught:
        strategy(num_replicas).run(lambda: v.assign_add(1.0))
    return [str(caught.value)] * num_replicas


@pytest.mark.parametrize("num_replicas", [2])
@pytest.mark.parametrize("backend", ["tensorflow"])
def test_a_variable_of_another_strategy_is_named(backend, num_replicas):
    for text in on_replicas(backend, 1, num_replicas, in_worker_other_strategy):
        assert "stranger" in text  # on other backends, there is one variable for all devices


# Failures ---------------------------------------------------------------------------------------------------


def in_worker_failure(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        variables = [
            keras.Variable(np.float32(1), trainable=False, aggregation=how, synchronization=when)
            for how in ("sum", "mean", "only_first_replica")
            for when in ("auto", "on_read")
        ]
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    outside = keras.Variable(np.float32(1), trainable=False)
    x = per_replica(s, lambda i: np.full((1, 1), i + 1, "float32"))

    def step(x, fail):
        loss_fn = lambda: keras.ops.sum(model(x))  # noqa: E731
        _, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        for variable in (*variables, outside):
            variable.assign(variable * 10 + x[0, 0])
        if fail:
            raise LookupError("in the middle")

    every = [*variables, outside, *model.variables, *optimizer.variables]
    with pytest.raises(LookupError):
        s.run(step, args=(x, True))
    locals_ = [numpy_of(list(s.runtime.local_values(v))) for v in every]
    inside = local_results(s, s.run(lambda: [v.value + 0 for v in every]))
    s.run(step, args=(x, False))
    kdist.experimental.check_in_sync(every, strategy=s)
    return [(locals_, values) for values in inside]


@each_cluster
def test_a_failure_leaves_the_replicas_of_a_worker_alike(backend, num_workers, num_replicas):
    for locals_, inside in on_replicas(backend, num_workers, num_replicas, in_worker_failure):
        for index, (parts, value) in enumerate(zip(locals_, inside, strict=True)):
            for part in parts:
                np.testing.assert_array_equal(part, parts[0], err_msg=f"variable {index}")
            if index == 1:  # a sum that is aggregated when it is read
                value = value * num_replicas
            np.testing.assert_allclose(value, parts[0], rtol=1e-6, err_msg=f"variable {index}")
