"""`ReplicaContext`: `all_reduce` and `all_gather` with their gradients, and `merge_call`."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import run, strategy
from tests.loops.clusters import each_cluster, local_results, numpy_of, on_replicas, on_workers, per_replica

# Collectives ------------------------------------------------------------------------------------------------


def in_worker_all_reduce(num_replicas):
    s = strategy(num_replicas)
    vectors = per_replica(s, lambda i: np.array([i + 1, 10 * i], "float32"))
    integers = per_replica(s, lambda i: np.array(3 * i, "int32"))
    small = per_replica(s, lambda i: [np.array([True, i == 0]), np.array([100, i], "int8")])

    def fn(vector, integer, small):
        reduce = kdist.get_replica_context().all_reduce
        return {
            "sum": [reduce(op, vector) for op in (kdist.ReduceOp.SUM, "SUM", "sum")],
            "mean": [reduce(op, vector) for op in (kdist.ReduceOp.MEAN, "mean")],
            "means of integers": reduce("MEAN", [*small, integer]),
            "sums of small": reduce("SUM", small),
            "sum of nothing": reduce("SUM", vector[:0]),
            "structure": reduce("SUM", {"a": [vector, None], "b": (integer,)}),
            "number": reduce("SUM", 2.0),
            "twice": reduce("SUM", reduce("SUM", vector)),
            "options": reduce("SUM", vector, kdist.experimental.CommunicationOptions()),
        }

    args = vectors, integers, small
    eager, compiled = s.run(fn, args), kdist.function(lambda *args: s.run(fn, args))(*args)
    return list(zip(local_results(s, eager), local_results(s, compiled), strict=True))


@pytest.mark.kills(all_reduce_means_overflow="torch")
@each_cluster
def test_all_reduce_gives_every_replica_the_result(backend, num_workers, num_replicas):
    ids = np.arange(num_replicas)
    total = np.array([ids.sum() + num_replicas, 10 * ids.sum()])
    for results in on_replicas(backend, num_workers, num_replicas, in_worker_all_reduce):
        for found in results:
            for value in [*found["sum"], found["structure"]["a"][0], found["options"]]:
                np.testing.assert_allclose(value, total)
            for value in found["mean"]:
                np.testing.assert_allclose(value, total / num_replicas, rtol=1e-6)
            flags, numbers, integer = found["means of integers"]
            np.testing.assert_allclose(flags, [1, 1 / num_replicas], rtol=1e-6)
            np.testing.assert_allclose(numbers, [100, ids.mean()], rtol=1e-6)
            np.testing.assert_allclose(integer, 3 * ids.mean(), rtol=1e-6)
            flags, numbers = found["sums of small"]
            assert flags.tolist() == [num_replicas, 1] and flags.dtype == "int32"
            overflow = np.full(num_replicas, 100, "int8").sum(dtype="int8")
            assert numbers.tolist() == [overflow, ids.sum()] and numbers.dtype == "int8"
            assert found["sum of nothing"].shape == (0,)
            assert found["structure"]["a"][1] is None
            (integer,) = found["structure"]["b"]
            assert integer == 3 * ids.sum() and integer.dtype == "int32"
            assert found["number"] == 2 * num_replicas
            np.testing.assert_allclose(found["twice"], total * num_replicas)


def in_worker_all_gather(num_replicas):
    import keras

    s = strategy(num_replicas)
    rows = per_replica(s, lambda i: np.arange(4, dtype="float32").reshape(2, 2) + 10 * i)
    integers = per_replica(s, lambda i: np.array([i, -i], "int32"))
    uneven = {
        "a": per_replica(s, lambda i: np.full((i + 1, 2), i, "float32")),
        "b": per_replica(s, lambda i: np.arange(2 - i % 2, dtype="int32") + 10 * i),
    }

    def even_fn(rows, integers):
        gather = kdist.get_replica_context().all_gather
        return {
            "axis 0": gather(rows, axis=0),
            "axis 1": gather(rows, axis=1),
            "axis -1": gather(rows, axis=-1),
            "bfloat16": keras.ops.cast(gather(keras.ops.cast(rows, "bfloat16"), axis=0), "float32"),
            "structure": gather([integers, (None, rows)], axis=0),
        }

    def uneven_fn(structure):
        found = kdist.get_replica_context().all_gather(structure, axis=0)
        total = kdist.get_replica_context().all_reduce("SUM", np.float32(1))
        return found | {"total": total}

    even = s.run(even_fn, args=(rows, integers))
    return list(zip(local_results(s, even), local_results(s, s.run(uneven_fn, args=(uneven,))), strict=True))


@pytest.mark.kills(torch_padding_gathered="torch")
@each_cluster
def test_all_gather_gives_every_replica_all_rows(backend, num_workers, num_replicas):
    ids = range(num_replicas)
    rows = [np.arange(4.0).reshape(2, 2) + 10 * i for i in ids]
    for even, uneven in on_replicas(backend, num_workers, num_replicas, in_worker_all_gather):
        for name in ("axis 0", "bfloat16"):
            np.testing.assert_array_equal(even[name], np.concatenate(rows))
        np.testing.assert_array_equal(even["axis 1"], np.concatenate(rows, axis=1))
        np.testing.assert_array_equal(even["axis -1"], np.concatenate(rows, axis=1))
        integers, (none, again) = even["structure"]
        assert integers.dtype == "int32" and integers.tolist() == [x for i in ids for x in (i, -i)]
        assert none is None
        np.testing.assert_array_equal(again, even["axis 0"])
        assert uneven["a"].tolist() == [[i, i] for i in ids for _ in range(i + 1)]
        assert uneven["b"].tolist() == [x for i in ids for x in ([10 * i] if i % 2 else [10 * i, 10 * i + 1])]
        assert uneven["total"] == num_replicas


# Their gradients --------------------------------------------------------------------------------------------


def in_worker_gradients(num_replicas, extra_rows):
    """Returns each replica's losses and gradients; `v` is one variable, but c, k, w differ per replica."""
    import keras

    s = strategy(num_replicas)
    ops = keras.ops
    with s.scope():
        v = keras.Variable(np.float32(2))

    def fn(c, k, w):
        context = kdist.get_replica_context()
        losses = {
            "sum": lambda: k * context.all_reduce("SUM", c[0] * v),
            "square": lambda: k * ops.square(context.all_reduce("SUM", c[0] * v)),
            "mean": lambda: k * context.all_reduce("MEAN", c[0] * v),
            "both": lambda: k * context.all_reduce("SUM", context.all_reduce("SUM", c[0] * v) * k),
            "local too": lambda: k * context.all_reduce("SUM", c[0] * v) + v,
            "gather": lambda: ops.sum(w * context.all_gather(c * v, axis=0)),
            "gather 1": lambda: ops.sum(w * context.all_gather(ops.reshape(c * v, (1, -1)), axis=1)[0]),
        }
        found = {}
        for name, loss in losses.items():
            value, (gradient,) = kdist.value_and_grad(loss, [v])()
            found[name] = (value, gradient)
        return found

    total = sum(1 + extra_rows * i for i in range(num_replicas))
    c = per_replica(s, lambda i: np.arange(1, 2 + extra_rows * i, dtype="float32") * (i + 1))
    k = per_replica(s, lambda i: np.float32(10 * (i + 1)))
    w = per_replica(s, lambda i: np.arange(1, 1 + total, dtype="float32") * (i + 1))
    eager = s.run(fn, args=(c, k, w))
    if extra_rows:
        return local_results(s, eager)
    compiled = kdist.function(lambda *args: s.run(fn, args=args))(c, k, w)
    return [a | {f"{n} compiled": x for n, x in b.items()} for a, b in zip(
        local_results(s, eager), local_results(s, compiled), strict=True)]  # fmt: skip


@pytest.mark.kills(torch_gradient_of_a_sum_lost="torch")
@pytest.mark.parametrize("extra_rows", [0, 1])
@each_cluster
def test_gradients_are_the_sums_of_what_all_replicas_pass_back(
    backend, num_workers, num_replicas, extra_rows
):
    ids = np.arange(num_replicas)
    v, k = 2.0, 10.0 * (ids + 1)
    rows = [np.arange(1.0, 2 + extra_rows * i) * (i + 1) for i in ids]
    c = np.array([row[0] for row in rows])
    s = v * c.sum()
    everything = np.concatenate(rows)
    w = np.arange(1.0, 1 + len(everything)) * (ids[:, None] + 1)
    ends = np.cumsum([len(row) for row in rows])
    for i, found in enumerate(
        on_replicas(backend, num_workers, num_replicas, in_worker_gradients, extra_rows)
    ):
        mine = w[:, ends[i] - len(rows[i]) : ends[i]]
        expected = {
            "sum": (k[i] * s, c[i] * k.sum()),
            "square": (k[i] * s**2, c[i] * (2 * k * s).sum()),
            "mean": (k[i] * s / num_replicas, c[i] * k.sum() / num_replicas),
            # y_i = k_i Σ_j k_j s, so the gradient of the inner sum on replica j is k_j Σ_i k_i.
            "both": (k[i] * k.sum() * s, c[i] * (k * k.sum()).sum()),
            "local too": (k[i] * s + v, c[i] * k.sum() + 1),
            "gather": ((w[i] * everything * v).sum(), (rows[i] * mine.sum(0)).sum()),
        }
        expected["gather 1"] = expected["gather"]
        assert len(found) == (1 if extra_rows else 2) * len(expected)
        for name, values in found.items():
            np.testing.assert_allclose(values, expected[name.removesuffix(" compiled")], rtol=1e-5)


# merge_call -------------------------------------------------------------------------------------------------


def in_worker_merge(num_replicas):
    import keras

    s = strategy(num_replicas)
    num_local = len(s.runtime.devices)
    with s.scope():
        variable = keras.Variable(np.float32(1), trainable=False, aggregation="mean")
    calls = []

    def merge_fn(merged_strategy, x, structure, *, name, none):
        assert merged_strategy is s
        assert kdist.in_cross_replica_context() and kdist.get_replica_context() is None
        assert kdist.get_strategy() is s
        parts = s.experimental_local_results(x)
        assert len(parts) == num_local
        assert isinstance(x, kdist.DistributedValues) == (num_local > 1)
        assert none is None
        calls.append(name)
        local = sum(parts[1:], parts[0])
        variable.assign(local * 100)
        return {
            "local": local,
            "total": s.reduce("SUM", x, axis=None),
            "mean": s.reduce("MEAN", structure["a"][0], axis=None),
            "own": x,
            "none": None,
            "plain": 5,
        }

    def fn(x):
        context = kdist.get_replica_context()
        found = context.merge_call(merge_fn, args=(x, {"a": [x * 2]}), kwargs={"name": "n", "none": None})
        assert kdist.get_replica_context() is context and not kdist.in_cross_replica_context()
        return found | {"variable": variable.value + 0}

    x = per_replica(s, lambda i: np.float32(i + 1))
    results = s.run(fn, args=(x,))
    if keras.backend.backend() != "jax":  # JAX calls `merge_fn` while it traces
        assert len(calls) == 1
    assert {*calls} == {"n"}
    return [(part, numpy_of(variable.value)) for part in local_results(s, results)]


@each_cluster
def test_merge_call_speaks_for_all_replicas(backend, num_workers, num_replicas):
    numbers = np.arange(num_replicas) + 1
    by_worker = np.split(numbers, num_workers)
    for i, (found, variable) in enumerate(on_replicas(backend, num_workers, num_replicas, in_worker_merge)):
        local = by_worker[i * num_workers // num_replicas].sum()
        assert found["local"] == local
        assert found["total"] == numbers.sum()
        np.testing.assert_allclose(found["mean"], 2 * numbers.mean(), rtol=1e-6)
        assert found["own"] == i + 1, "of a distributed value, each replica gets its component"
        assert found["none"] is None and found["plain"] == 5
        assert found["variable"] == 100 * local
        if num_workers == 1:
            assert variable == 100 * local


def in_worker_merge_errors(num_replicas):
    import keras

    s = strategy(num_replicas)

    def wrong(s, x):
        raise LookupError("nothing found")

    def reduce_in_merge(s, x):
        return outer.all_reduce("SUM", x)

    outer = None

    def fn(merge_fn):
        nonlocal outer
        outer = kdist.get_replica_context()
        return outer.merge_call(merge_fn, args=(1.0,))

    with pytest.raises(LookupError, match="nothing found"):
        s.run(fn, args=(wrong,))
    with pytest.raises(kdist.errors.StrategyScopeError, match="all_reduce"):
        s.run(fn, args=(reduce_in_merge,))
    backend = keras.backend.backend()
    if backend == "jax" or (backend == "torch" and len(s.runtime.devices) > 1):
        with pytest.raises(kdist.errors.StrategyScopeError, match="in a function of `merge_call`"):
            s.run(fn, args=(lambda s, x: s.run(lambda: x),))
    return local_results(s, s.run(lambda: kdist.get_replica_context().all_reduce("SUM", 1.0)))


@pytest.mark.kills(
    torch_run_in_merge_call_hangs="2-replicas-on-1-torch", jax_run_in_merge_call_traced="2-replicas-on-1-jax"
)
@each_cluster
def test_errors_in_merge_call_come_out(backend, num_workers, num_replicas):
    for total in on_replicas(backend, num_workers, num_replicas, in_worker_merge_errors):
        assert total == num_replicas


# Wrong uses -------------------------------------------------------------------------------------------------


def in_worker_wrong_uses(num_replicas):
    import keras

    s = strategy(num_replicas)
    wrong = kdist.errors.InvalidArgumentError
    distributed = kdist.DistributedValues([np.float32(i) for i in s.runtime.replica_ids])
    vectors = per_replica(s, lambda i: np.ones(2, "float32"))
    kept = []

    def context():
        return kdist.get_replica_context()

    for call, match in (
        (lambda x: context().all_reduce("MAX", x), "reduce_op is not"),
        (lambda x: context().all_reduce("SUM", distributed), "one replica"),
        (lambda x: context().all_gather(distributed, axis=0), "one replica"),
        (lambda x: context().all_gather(x[0], axis=0), "axis"),
        (lambda x: context().all_gather(x, axis=1), "axis"),
    ):
        with pytest.raises(wrong, match=match):
            s.run(call, args=(vectors,))
    s.run(lambda: kept.append(context()))
    for call in (
        lambda: kept[0].all_reduce("SUM", 1.0),
        lambda: kept[0].all_gather(keras.ops.ones(1), axis=0),
        lambda: kept[0].merge_call(lambda s: None),
    ):
        with pytest.raises(kdist.errors.StrategyScopeError, match="context"):
            call()
        with pytest.raises(kdist.errors.StrategyScopeError, match="context"):
            s.run(call)
    return True


@each_cluster
def test_wrong_uses_are_refused(backend, num_workers, num_replicas):
    assert all(on_workers(backend, num_workers, num_replicas, in_worker_wrong_uses))


def in_worker_different_collectives(num_replicas):
    import keras

    s = strategy(num_replicas)

    def fn():
        context = kdist.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return context.all_reduce("SUM", keras.ops.ones(2))
        return context.all_gather(keras.ops.ones(2), axis=0)

    with pytest.raises(kdist.errors.WorkerMismatchError, match="different collectives"):
        s.run(fn)
    return True


# TensorFlow does not detect the difference, and on JAX, replicas cannot differ.
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_meet_in_the_same_collectives(num_replicas):
    assert run("torch", 1, in_worker_different_collectives, num_replicas)[0]
