"""Parts of docstrings of `tf.distribute` that other tests in this directory do not cover."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from kdist.values import PerReplica
from tests.helpers.processes import each_backend, run, start_pool, strategy
from tests.loops.clusters import (
    each_cluster,
    each_cluster_of,
    local_results,
    numpy_of,
    on_replicas,
    on_workers,
    per_replica,
)

# Strategy ---------------------------------------------------------------------------------------------------


def in_worker_examples(num_replicas):
    import keras

    s = strategy(num_replicas)
    ops = keras.ops

    @kdist.function
    def values_in_a_function():
        # As in the docstring of `run`, but created while the function is traced.
        numbers = s.experimental_distribute_values_from_function(
            lambda c: ops.ones(()) * c.num_replicas_in_sync
        )
        ids = s.experimental_distribute_values_from_function(
            lambda c: ops.convert_to_tensor(c.replica_id_in_sync_group)
        )
        twice = s.run(lambda x: x * 2, args=(numbers,))
        totals = s.run(lambda x: kdist.get_replica_context().all_reduce("sum", x), args=(ids,))
        return twice, totals

    array = np.array([3.0, 2.0, 1.0])
    from_array = s.experimental_distribute_values_from_function(lambda c: array[c.replica_id_in_sync_group])
    constant = s.run(lambda x: x * 2.0, args=(ops.convert_to_tensor(3.0),))
    single = ops.reshape(ops.arange(6, dtype="int32"), (1, 2, 3))
    everywhere = s.experimental_distribute_values_from_function(lambda _: single)
    gathered = [s.gather(everywhere, axis=axis) for axis in (0, 1, 2)]
    # Six rows: replica 0 has [0, 1, 2, 3], replica 1 has [4, 5], and other replicas have none.
    rows = per_replica(s, lambda i: np.arange(4 * i, min(4 * i + 4, 6), dtype="float32"))
    # A variable is a single value for all of its replicas.
    with s.scope():
        v = keras.Variable(np.float32(4), trainable=False)
        assert kdist.get_strategy() is s
    assert s.experimental_local_results(v) == (v,) * len(s.runtime.devices)
    assert v in s.experimental_local_results(s.extended.value_container(v))
    assert s.run(kdist.get_strategy) is s or all(x is s for x in s.run(kdist.get_strategy).values)
    assert kdist.get_strategy() is not s
    return list(
        zip(
            local_results(s, values_in_a_function()),
            local_results(s, from_array),
            local_results(s, constant),
            [numpy_of(gathered)] * len(s.runtime.devices),
            [numpy_of([s.reduce(op, rows, axis=0) for op in ("MEAN", "SUM")])] * len(s.runtime.devices),
            strict=True,
        )
    )


@each_cluster
def test_the_examples_of_strategy(backend, num_workers, num_replicas):
    single = np.arange(6).reshape(1, 2, 3)
    for i, found in enumerate(on_replicas(backend, num_workers, num_replicas, in_worker_examples)):
        (twice, total), from_array, constant, gathered, (mean, summed) = found
        assert twice == 2 * num_replicas and total == sum(range(num_replicas))
        assert from_array == (3.0, 2.0, 1.0)[i] and constant == 6
        for axis, value in enumerate(gathered):
            np.testing.assert_array_equal(value, np.concatenate([single] * num_replicas, axis))
            assert value.dtype == "int32"
        assert mean == 2.5 and summed == 15, "six rows, whatever the replicas have of them"


def in_worker_one_device():
    s = kdist.OneDeviceStrategy("cpu:0")
    x = np.array([[1, 2], [3, 6]], "float32")
    context = s.run(kdist.get_replica_context)
    assert context.num_replicas_in_sync == 1 and context.strategy is s
    return numpy_of([s.reduce("SUM", x, axis=None), s.reduce("MEAN", x, axis=0), s.gather(x, axis=1)])


@each_backend
def test_one_device_takes_regular_tensors(backend):
    same, mean, gathered = run(backend, 1, in_worker_one_device)[0]
    np.testing.assert_array_equal(same, [[1, 2], [3, 6]])
    np.testing.assert_array_equal(mean, [2, 4])
    np.testing.assert_array_equal(gathered, same)


# StrategyExtended and `merge_call` --------------------------------------------------------------------------


def in_worker_merge_and_update(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        variables = [keras.Variable(np.zeros(2, "float32"), trainable=False) for _ in range(3)]

    def step(x):
        """Follows the docstrings of `reduce_to`, `batch_reduce_to` and `update`."""

        def merge_fn(merged, value, integer, *variables):
            extended = merged.extended
            first, second, third = variables
            total = extended.reduce_to(kdist.ReduceOp.SUM, value, destinations=first)
            extended.update(first, lambda var, number: var.assign(number), args=(total,))
            mean, again = extended.batch_reduce_to("MEAN", [(value, second), (value, third)])
            extended.update(second, lambda var, x: var.assign_add(x), kwargs={"x": mean})
            extended.update(third, lambda var, x: var.assign(x * 10), args=(again,))
            return {
                "gathered": merged.gather(value, axis=0),
                "columns": merged.gather(integer, axis=1),
                "integers": merged.reduce("SUM", integer, axis=None),
                "rows": merged.reduce("MEAN", value, axis=0),
                "all rows": merged.reduce("SUM", value, axis=0),
            }

        context = kdist.get_replica_context()
        integer = keras.ops.cast(x[None], "int32")
        found = context.merge_call(merge_fn, args=(x, integer, *variables))
        return found, [variable.value + 0 for variable in variables]

    results = []
    for uneven in (False, True):
        x = per_replica(s, lambda i: np.array([i + 1, 10 * i], "float32"))
        if not uneven:
            found = s.run(step, args=(x,))
        else:  # different shapes, so JAX runs the replicas one by one
            other = per_replica(s, lambda i: np.ones(1 + i, "float32"))
            found = s.run(lambda x, other: step(x * other[0]), args=(x, other))
        results.append((local_results(s, found), [numpy_of(v.value) for v in variables]))
    return [[(own[i], outside) for own, outside in results] for i in range(len(s.runtime.devices))]


@each_cluster
def test_variables_are_updated_in_merge_calls(backend, num_workers, num_replicas):
    x = np.array([[i + 1, 10 * i] for i in range(num_replicas)])
    for calls in on_replicas(backend, num_workers, num_replicas, in_worker_merge_and_update):
        for number, ((found, inside), outside) in enumerate(calls, start=1):
            np.testing.assert_array_equal(found["gathered"], x.reshape(-1))
            np.testing.assert_array_equal(found["columns"], x.reshape(1, -1))
            np.testing.assert_array_equal(found["integers"], x.sum(0)[None])
            assert found["integers"].dtype == found["columns"].dtype == "int32"
            np.testing.assert_allclose(found["rows"], x.mean(), rtol=1e-6)
            np.testing.assert_allclose(found["all rows"], x.sum(), rtol=1e-6)
            for values in (inside, outside):
                np.testing.assert_allclose(values, [x.sum(0), number * x.mean(0), 10 * x.mean(0)], rtol=1e-6)


def in_worker_wrong_updates(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        v = keras.Variable(np.zeros(2, "float32"), trainable=False)
    parts = PerReplica([np.ones(2, "float32")] * 2)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="one value per replica"):
        s.extended.update(v, lambda var, x: var.assign(x), args=(parts,))
    # The backend raises its own error before anything changes.
    words = {"tensorflow": "unsupported type", "jax": "'PerReplica'", "torch": "Invalid dtype: object"}
    with pytest.raises((ValueError, TypeError), match=words[keras.backend.backend()]):
        v.assign(parts)
    np.testing.assert_array_equal(numpy_of(v.value), [0, 0])
    for call in (
        lambda: s.extended.update(v, lambda var: var.assign([1.0, 1.0])),
        lambda: s.extended.reduce_to("SUM", np.ones(2, "float32"), destinations=v),
        lambda: s.extended.batch_reduce_to("SUM", [(np.ones(2, "float32"), v)]),
    ):
        with pytest.raises(kdist.errors.StrategyScopeError, match="inside a replica"):
            s.run(call)
    mirrored = kdist.DistributedValues([np.full(2, 3, "float32")] * len(s.runtime.devices))
    grouped = s.extended.update(v, lambda var, x: var.assign(x), args=(mirrored,))
    listed = s.extended.update(v, lambda var, x: {"x": var + x}, args=(mirrored,), group=False)
    assert len(listed["x"]) == len(s.runtime.devices)
    return numpy_of([grouped, *listed["x"]])


@pytest.mark.kills(update_takes_one_value_a_replica="torch")
@each_cluster
def test_updates_take_one_value_for_all_replicas(backend, num_workers, num_replicas):
    for grouped, *listed in on_workers(backend, num_workers, num_replicas, in_worker_wrong_updates):
        np.testing.assert_array_equal(grouped, [3, 3])
        for value in listed:
            np.testing.assert_array_equal(value, [6, 6])


# Types that only TensorFlow has -----------------------------------------------------------------------------


def in_worker_native_values(num_replicas):
    import tensorflow as tf

    s = strategy(num_replicas)

    def slices(i):
        return tf.IndexedSlices(tf.ones((1, 2)) * (i + 1), tf.constant([i]), tf.constant([3, 2]))

    def fn(x):
        context = kdist.get_replica_context()
        return context.all_reduce(
            tf.distribute.ReduceOp.SUM, [slices(int(context.replica_id_in_sync_group)), x]
        )

    sparse = s.experimental_distribute_values_from_function(
        lambda c: tf.sparse.from_dense(tf.one_hot(c.replica_id_in_sync_group, 4)[None])
    )
    ragged = s.experimental_distribute_values_from_function(
        lambda c: tf.ragged.constant([[1.0] * (c.replica_id_in_sync_group + 1), [2.0]])
    )

    def composite(sparse, ragged):
        return tf.sparse.reduce_sum(sparse, axis=0), tf.reduce_sum(ragged, axis=1)

    reduced = s.run(fn, args=(tf.ones(2),))
    found = [
        s.run(composite, args=(sparse, ragged)),
        tf.function(lambda *a: s.run(composite, args=a))(sparse, ragged),
    ]
    return list(zip(local_results(s, reduced), *[local_results(s, f) for f in found], strict=True))


@each_cluster_of("tensorflow")
def test_indexed_slices_and_composite_tensors(backend, num_workers, num_replicas):
    total = np.zeros((3, 2))
    for i in range(num_replicas):
        total[i] += i + 1
    for i, (reduced, *composite) in enumerate(
        on_replicas(backend, num_workers, num_replicas, in_worker_native_values)
    ):
        np.testing.assert_array_equal(reduced[0], total)
        np.testing.assert_array_equal(reduced[1], [num_replicas] * 2)
        for sparse, ragged in composite:
            np.testing.assert_array_equal(sparse, np.eye(4)[i])
            np.testing.assert_array_equal(ragged, [i + 1, 2])


# Shapes that must be equal ----------------------------------------------------------------------------------


def in_worker_unequal_shapes(num_replicas):
    import keras

    s = strategy(num_replicas)
    x = per_replica(s, lambda i: np.ones((2, 1 + i), "float32"))
    for call, name, shapes in (
        (lambda x: kdist.get_replica_context().all_gather(x, axis=0), "gathering", ("(1,)", "(2,)")),
        (lambda x: kdist.get_replica_context().all_reduce("SUM", x), "sum", ("(2, 1)", "(2, 2)")),
    ):
        kind: type[Exception] = kdist.errors.WorkerMismatchError
        if keras.backend.backend() == "tensorflow":  # TensorFlow's collectives compare the shapes
            import tensorflow as tf

            kind = tf.errors.InvalidArgumentError
            name, shapes = "Shape mismatch in the collective", ("expected shape [",)
        with pytest.raises(kind) as caught:
            s.run(call, args=(x,))
        for words in (name, *shapes):
            assert words in str(caught.value)
    return numpy_of(s.reduce("SUM", s.run(lambda x: x[0, 0], args=(x,)), axis=None))


@pytest.mark.kills(torch_shapes_not_compared="torch")
@each_backend
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_shapes_differ_along_the_axis_only(backend, num_replicas):
    # A kept pool would break: TensorFlow's collectives on these devices stay aborted for later tests.
    with start_pool(1, backend) as pool:
        assert pool.run(in_worker_unequal_shapes, num_replicas) == [num_replicas]


def in_worker_signature(num_replicas):
    import tensorflow as tf

    s = strategy(num_replicas)
    x = np.arange(14, dtype="float32").reshape(7, 2)
    names = np.array(list("abcdefg"))
    batches = s.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, {"name": names, "none": x[:, 0]})).batch(4)
    )
    traces = []

    # As in TensorFlow's tutorial on distributed input.
    @tf.function(input_signature=[batches.element_spec])
    def step(inputs):
        traces.append(inputs)
        return s.run(lambda x, others: tf.reduce_sum(x) + tf.cast(tf.size(others["name"]), x.dtype), inputs)

    found, counts = [], []
    for batch in batches:
        found.append(sum(float(part) for part in s.experimental_local_results(step(batch))))
        counts.append(len(traces))
    leaves = tf.nest.flatten(batches.element_spec)
    assert iter(batches).element_spec == batches.element_spec
    assert all(isinstance(leaf, tf.TypeSpec) for leaf in leaves) and len(leaves) == 3
    (one,) = {*tf.nest.flatten(batches.element_spec[0], expand_composites=True)}
    assert one == tf.TensorSpec((None, 2), tf.float32)
    try:
        step(tf.ones(3))
    except TypeError:
        return found, counts
    return found, "took another argument"


@pytest.mark.kills(tensorflow_specs_of_one_replica="[2-replicas-on-1-tensorflow]")
@each_cluster_of("tensorflow")
def test_specs_of_elements_are_a_signature(backend, num_workers, num_replicas):
    everyone = on_workers(backend, num_workers, num_replicas, in_worker_signature)
    np.testing.assert_allclose(np.sum([found for found, _ in everyone], axis=0), [28 + 4, 63 + 3])
    # TensorFlow traces twice if it creates variables in the first trace.
    # It does not trace again for another number of rows.
    assert all(first == last and first in (1, 2) for _, (first, last) in everyone)


WORDS = ([2, 0, 2], [2, 1], [], [1, 1, 0])


def in_worker_occurrences(num_replicas):
    import keras
    import tensorflow as tf

    s = strategy(num_replicas)
    with s.scope():
        table = keras.Variable(np.zeros((3, 2), "float32"))
        optimizer = keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.0)
        optimizer.build([table])
    words = per_replica(s, lambda i: np.array(WORDS[i], "int32"))

    def step(words):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keras.ops.take(table, words, axis=0) * tf.constant([1.0, 2.0]))
        optimizer.apply(tape.gradient(loss, [table]), [table])

    s.run(step, args=(words,))
    tf.function(lambda: s.run(step, args=(words,)))()
    return numpy_of(table.value), numpy_of(optimizer.variables[2].value)


@each_cluster_of("tensorflow")
def test_gradients_of_looked_up_rows_are_squared_one_by_one(backend, num_workers, num_replicas):
    counts = np.bincount([word for words in WORDS[:num_replicas] for word in words], minlength=3)[
        :, None
    ] * np.ones(2)
    gradient = counts * [1.0, 2.0]
    squares = [step * counts * [1.0, 4.0] for step in (1, 2)]  # after each of two steps
    expected = -0.5 * sum(gradient / np.sqrt(square + 1e-7) for square in squares)
    for table, accumulator in on_workers(backend, num_workers, num_replicas, in_worker_occurrences):
        np.testing.assert_allclose(accumulator, squares[1], rtol=1e-5)
        np.testing.assert_allclose(table, expected, rtol=1e-5)
