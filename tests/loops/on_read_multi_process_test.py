"""`synchronization="on_read"`: one component per replica, and the aggregated value outside of replicas."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, local_results, number_of, numpy_of, on_replicas, per_replica

KINDS = [
    ("sum", "float32"),
    ("sum", "int32"),
    ("mean", "float32"),
    ("only_first_replica", "float32"),
    ("only_first_replica", "int32"),
    ("none", "float32"),
]


def in_worker_on_read(num_replicas, rows):
    """Writes in and out of `run`; returns the values inside and outside of replicas after each write."""
    import keras

    s = strategy(num_replicas)
    with s.scope():
        variables = [
            keras.Variable(
                np.array([0, 7]), dtype=d, trainable=False, aggregation=how, synchronization="on_read"
            )
            for how, d in KINDS
        ]
    # Shapes are equal, or each replica has one more row than the last, which JAX does not compile.
    numbers = per_replica(s, lambda i: np.full(2 + rows * i, i + 1, "float32"))
    seen = []

    def run(fn):
        def read_after(x):
            fn(x[0])
            return [variable.value + 0 for variable in variables]

        own = local_results(s, s.run(read_after, args=(numbers,)))
        compiled = local_results(
            s, kdist.function(lambda x: s.run(lambda _: [v + 0 for v in variables], args=(x,)))(numbers)
        )
        seen.append((own, compiled, [numpy_of(v.value) for v in variables]))

    def each(change):
        def fn(x):
            for variable in variables:
                change(variable, keras.ops.cast(x, variable.dtype))

        return fn

    def in_merge(x):
        def merge_fn(merged, number):
            found = [v.value + 0 for v in variables]  # aggregated values, in cross-replica context
            for v in variables:
                v.assign(v + 6)
            return found

        for v in variables:
            v.assign(v + keras.ops.cast(x, v.dtype))
        found = kdist.get_replica_context().merge_call(merge_fn, args=(x,))
        merged_values.append(None)
        for v, value in zip(variables, found, strict=True):
            v.assign(v * 10 + value)

    merged_values = []
    run(lambda x: None)
    run(each(lambda v, x: v.assign(v * 0 + x)))
    run(each(lambda v, x: v.assign_add(x * 10)))
    for v in variables:
        v.assign([5, 6])
    run(lambda x: None)
    run(each(lambda v, x: v.assign(v + x)))
    for v in variables:
        v.assign(v)  # the same value, but each replica gets its share again
    run(lambda x: None)

    def failing(x):
        for v in variables:
            v.assign(v * 0)
        raise LookupError("in the middle")

    with pytest.raises(LookupError):
        s.run(lambda x: failing(x[0]), args=(numbers,))
    run(lambda x: None)
    run(in_merge)
    number = len(s.runtime.devices)
    return [[(own[i], compiled[i], outside) for own, compiled, outside in seen] for i in range(number)]


def shares(how, dtype, value, number):
    """Returns the components of a value that was assigned outside of replicas."""
    if how != "sum":
        return [value] * number
    if dtype == "float32":
        return [value / number] * number
    return [value // number + (value % number > i) for i in range(number)]


def total_of(how, parts):
    if how == "sum":
        return sum(parts)
    return sum(parts) / len(parts) if how in ("mean", "none") else parts[0]


def by_hand(how, dtype, number):
    numbers = [i + 1 for i in range(number)]
    seen = []

    def note(parts, total):
        seen.append((parts, total))
        return parts

    def run(parts):
        return note(parts, total_of(how, parts))

    note(shares(how, dtype, np.array([0, 7]), number), np.array([0, 7]))
    parts = run([np.array([x, x]) for x in numbers])
    parts = run([p + 10 * x for p, x in zip(parts, numbers, strict=True)])
    parts = note(shares(how, dtype, np.array([5, 6]), number), np.array([5, 6]))
    parts = run([p + x for p, x in zip(parts, numbers, strict=True)])
    total = total_of(how, parts)
    parts = note(shares(how, dtype, total, number), total)
    parts = note(parts, total)  # a function that failed has changed nothing
    merged = total_of(how, [p + x for p, x in zip(parts, numbers, strict=True)])
    run([p * 10 + merged for p in shares(how, dtype, merged + 6, number)])
    return seen


@pytest.mark.parametrize("rows", [0, 1])
@each_cluster
def test_each_replica_has_a_component(backend, num_workers, num_replicas, rows):
    found = on_replicas(backend, num_workers, num_replicas, in_worker_on_read, rows)
    for index, (how, dtype) in enumerate(KINDS):
        expected = by_hand(how, dtype, num_replicas)
        for i, steps in enumerate(found):
            assert len(steps) == len(expected)
            for step, ((own, later, outside), (parts, total)) in enumerate(zip(steps, expected, strict=True)):
                where = f"{how} {dtype}, step {step}, replica {i}"
                for value in (own[index], later[index]):
                    np.testing.assert_allclose(value, parts[i], rtol=1e-5, err_msg=where)
                    assert value.dtype == dtype
                np.testing.assert_allclose(outside[index], total, rtol=1e-5, err_msg=where)


# Models, metrics and files ----------------------------------------------------------------------------------


def in_worker_model(num_replicas, path):
    import keras

    s = strategy(num_replicas)

    class Counts(keras.layers.Layer):
        def build(self, shape):
            options = {"aggregation": "sum", "synchronization": "on_read"}
            self.rows = keras.Variable("zeros", shape=(), trainable=False, **options)

        def call(self, x):
            self.rows.assign(self.rows + keras.ops.sum(x))
            return x

    with s.scope():
        model = keras.Sequential([keras.layers.Input((1,)), Counts(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        metric = keras.metrics.Mean()
    rows = model.layers[0].rows
    x = np.arange(1, 13, dtype="float32")[:, None]
    own = per_replica(s, lambda i: np.full((2, 1), i + 1, "float32"))
    seen = []

    def step(x):
        model(x, training=True)
        metric.update_state(x)
        return rows.value + 0, metric.result()

    def call():
        parts = local_results(s, s.run(step, args=(own,)))
        seen.append((parts, float(rows), float(metric.result())))

    call()
    model.fit(x, x, batch_size=6, verbose=0)
    after_fit = float(rows)
    call()
    # Each worker reads the file that it wrote.
    file = f"{path}/{s.runtime.worker_index}.weights.h5"
    model.save_weights(file)
    rows.assign(0.0)
    metric.reset_state()
    call()
    model.load_weights(file)
    call()
    kdist.experimental.check_in_sync(model)
    return [([(parts[i], a, b) for parts, a, b in seen], after_fit) for i in range(len(s.runtime.devices))]


@each_cluster
def test_components_and_fit_and_files(backend, num_workers, num_replicas, tmp_path):
    number, new = num_replicas, 2 * np.arange(1, num_replicas + 1)
    every = new.sum()
    found = on_replicas(backend, num_workers, num_replicas, in_worker_model, str(tmp_path))
    for i, (calls, after_fit) in enumerate(found):
        assert after_fit == every + 78  # 1 + 2 + … + 12, as on one device
        starts = [0, (every + 78) / number, 0, (2 * every + 78) / number]
        totals = [every, 2 * every + 78, every, 3 * every + 78]
        for ((component, result), total, mean), start, expected in zip(calls, starts, totals, strict=True):
            np.testing.assert_allclose(component, start + new[i], rtol=1e-6)
            np.testing.assert_allclose(result, i + 1, rtol=1e-6)  # of its own rows
            np.testing.assert_allclose(total, expected, rtol=1e-6)
            np.testing.assert_allclose(mean, (number + 1) / 2, rtol=1e-6)


# Branches ---------------------------------------------------------------------------------------------------


def in_worker_branches(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        added, plain = (keras.Variable(np.float32(10), trainable=False, aggregation="sum") for _ in range(2))
        on_read = keras.Variable(
            np.float32(num_replicas), trainable=False, aggregation="sum", synchronization="on_read"
        )

    def step(x):
        def taken():
            added.assign_add(x)
            on_read.assign(x * 2)
            return x

        return keras.ops.cond(x > 0, taken, lambda: x)

    def set_in_branch(x):
        return keras.ops.cond(x > 0, lambda: plain.assign(x), lambda: x)

    compiled = kdist.function(lambda x: s.run(step, args=(x,)))
    values = [per_replica(s, lambda i, sign=sign: np.float32(sign * (i + 1))) for sign in (1, -1)]
    found = []
    for x in values:
        compiled(x)
        found.append((float(added), float(on_read)))
    if keras.backend.backend() != "torch":  # on PyTorch, a branch is plain Python
        with pytest.raises(kdist.errors.InvalidArgumentError, match="in a branch"):
            kdist.function(lambda x: s.run(set_in_branch, args=(x,)))(values[0])
    return [found] * len(s.runtime.devices)


@each_cluster
def test_writes_in_branches(backend, num_workers, num_replicas):
    total = sum(range(1, num_replicas + 1))
    for found in on_replicas(backend, num_workers, num_replicas, in_worker_branches):
        assert found == [(10 + total, 2 * total)] * 2


def in_worker_local_results(num_replicas):
    import keras

    s = strategy(num_replicas)
    with s.scope():
        seen = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum", synchronization="on_read")
    s.run(seen.assign_add, args=(per_replica(s, lambda i: np.int32(10**i)),))
    assert number_of(seen) == sum(10**i for i in range(num_replicas))
    return [int(part) for part in local_results(s, seen)]


@each_cluster
def test_local_results_are_the_components(backend, num_workers, num_replicas):
    found = on_replicas(backend, num_workers, num_replicas, in_worker_local_results)
    assert found == [10**i for i in range(num_replicas)]
