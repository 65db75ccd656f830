"""`Strategy.reduce` and `Strategy.gather` turn one value per replica into one value for all replicas."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import start_pool, strategy
from tests.loops.clusters import each_cluster, each_cluster_of, numpy_of, on_workers, per_replica

# Reduce -----------------------------------------------------------------------------------------------------


def in_worker_reduce(num_replicas):
    import keras

    s = strategy(num_replicas)
    vectors = per_replica(s, lambda i: np.array([i + 1, 10 * i], "float32"))
    integers = per_replica(s, lambda i: np.array([i, 7], "int32"))
    small = per_replica(s, lambda i: [np.array([True, i == 0]), np.array([100, i], "int8")])
    rows = per_replica(s, lambda i: np.arange(2 * (i + 1), dtype="float32").reshape(-1, 2) + 100 * i)
    scalars = s.run(lambda: keras.ops.cast(kdist.get_replica_context().replica_id_in_sync_group, "float32"))
    numbers = per_replica(s, lambda i: i + 0.5)
    structure = {"a": vectors, "b": (scalars, None)}

    @kdist.function
    def compiled(vectors, rows):
        doubled = s.run(lambda x: x * 2, args=(vectors,))
        longer = s.run(lambda x: keras.ops.concatenate([x, -x, x]), args=(vectors,))
        means = [s.reduce("MEAN", rows, axis=axis) for axis in (0, (0, 1))]
        return [s.reduce("SUM", x, axis=None) for x in (doubled, longer)], means

    found = {
        "sum": [s.reduce(op, vectors, axis=None) for op in (kdist.ReduceOp.SUM, "SUM", "sum", "Sum")],
        "mean": [s.reduce(op, vectors, axis=None) for op in (kdist.ReduceOp.MEAN, "MEAN", "mean")],
        "structure": s.reduce("SUM", structure, axis=None),
        "numbers": s.reduce("SUM", numbers, axis=None),
        "integers": [s.reduce(op, integers, axis=None) for op in ("SUM", "MEAN")],
        "small": [s.reduce(op, small, axis=None) for op in ("SUM", "MEAN")],
        "integers, axis": [s.reduce(op, integers, axis=0) for op in ("SUM", "MEAN")],
        "rows": [s.reduce(op, rows, axis=0) for op in ("SUM", "MEAN")],
        "negative": [s.reduce(op, rows, axis=-2) for op in ("SUM", "MEAN")],
        "columns": [s.reduce(op, integers, axis=-1) for op in ("SUM", "MEAN")],
        "both axes": [s.reduce("SUM", rows, axis=(0, 1)), s.reduce("MEAN", rows, axis=[-1, 0])],
        "compiled": compiled(vectors, rows),
    }
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        found["sum"].append(s.reduce(tf.distribute.ReduceOp.SUM, vectors, axis=None))
    return numpy_of(found)


@pytest.mark.kills(
    "reduce_means_of_one_worker",
    reduce_sums_flags_as_flags="torch",
    reduce_means_along_several_axes="torch",
)
@each_cluster
def test_reduce_adds_or_averages(backend, num_workers, num_replicas):
    ids = np.arange(num_replicas)
    total = np.array([ids.sum() + num_replicas, 10 * ids.sum()])
    rows = np.concatenate([np.arange(2.0 * (i + 1)).reshape(-1, 2) + 100 * i for i in ids])
    for found in on_workers(backend, num_workers, num_replicas, in_worker_reduce):
        for value in found["sum"]:
            np.testing.assert_allclose(value, total)
        for value in found["mean"]:
            np.testing.assert_allclose(value, total / num_replicas, rtol=1e-6)
        np.testing.assert_allclose(found["structure"]["a"], total)
        assert found["structure"]["b"] == (ids.sum(), None)
        assert found["numbers"] == ids.sum() + num_replicas / 2
        np.testing.assert_array_equal(found["integers"][0], [ids.sum(), 7 * num_replicas])
        assert found["integers"][0].dtype == found["integers, axis"][0].dtype == "int32"
        np.testing.assert_allclose(found["integers"][1], [ids.mean(), 7], rtol=1e-6)
        (flags, numbers), means = found["small"]
        assert flags.tolist() == [num_replicas, 1] and flags.dtype == "int32"
        overflow = np.full(num_replicas, 100, "int8").sum(dtype="int8")
        assert numbers.tolist() == [overflow, ids.sum()] and numbers.dtype == "int8"
        np.testing.assert_allclose(means, [[1, 1 / num_replicas], [100, ids.mean()]], rtol=1e-6)
        for name in ("integers, axis", "columns"):
            assert found[name][0] == ids.sum() + 7 * num_replicas
            np.testing.assert_allclose(found[name][1], (ids.sum() + 7 * num_replicas) / (2 * num_replicas))
        for name in ("rows", "negative"):  # replicas have 1, 2 and 3 rows, and each row counts the same
            np.testing.assert_allclose(found[name][0], rows.sum(0))
            np.testing.assert_allclose(found[name][1], rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(found["both axes"], [rows.sum(), rows.mean()], rtol=1e-6)
        (doubled, longer), (mean, mean_of_all) = found["compiled"]
        np.testing.assert_allclose(doubled, 2 * total)
        np.testing.assert_allclose(longer, np.concatenate([total, -total, total]))
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(mean_of_all, rows.mean(), rtol=1e-6)


def in_worker_plain_values(num_replicas):
    s = strategy(num_replicas)
    one_replica_a_worker = len(s.runtime.devices) == 1
    means = [
        s.reduce("MEAN", 3.0, axis=None),
        s.reduce("MEAN", np.array([3, 3], "float32"), axis=None)[0],
        s.reduce("MEAN", np.array([2, 4], "float32"), axis=0),
        s.reduce("MEAN", {"a": [3.0]}, axis=None)["a"][0],
    ]
    if one_replica_a_worker:
        # The strategy cannot distinguish this value from a result of `run`.
        assert float(s.reduce("SUM", 3.0, axis=None)) == 3 * num_replicas
    else:
        for value in (3.0, np.ones(2, "float32"), {"a": np.float32(1)}):
            with pytest.raises(kdist.errors.InvalidArgumentError, match="not distributed") as caught:
                s.reduce("SUM", value, axis=None)
            assert isinstance(caught.value, ValueError)
    assert float(s.reduce("SUM", 0, axis=None)) == 0
    return [float(mean) for mean in means]


@each_cluster
def test_the_mean_of_a_plain_value_is_the_value(backend, num_workers, num_replicas):
    for means in on_workers(backend, num_workers, num_replicas, in_worker_plain_values):
        assert means == [3.0] * 4


def in_worker_numbers():
    """Reduces the number of rows; in the second batch, one replica has 1 row, and the others have 2 rows."""
    s = kdist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    found = []
    for batch in s.experimental_distribute_dataset([np.ones((rows, 1), "float32") for rows in (8, 7)]):
        number = s.run(lambda x: int(x.shape[0]), args=(batch,))
        found.append([float(numpy_of(s.reduce(op, number, axis=None))) for op in ("SUM", "MEAN")])
    return found, small_sums(s)


def small_sums(s):
    """Returns dtypes and values of sums of int8 and Booleans over the replicas, from a merge call."""
    import keras

    def fn():
        values = keras.ops.full((), 40, "int8"), keras.ops.full((), True, "bool")
        return kdist.get_replica_context().merge_call(lambda s, x: s.reduce("SUM", x, axis=None), (values,))

    return [(str(total.dtype), int(total)) for total in numpy_of(s.experimental_local_results(s.run(fn))[0])]


@pytest.mark.kills(reduce_equal_numbers_of_one_worker="[torch]")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("backend", ["jax", "torch"])  # on TensorFlow, a worker has one CPU device
def test_workers_with_several_replicas_reduce_numbers(backend):
    with start_pool(2, backend, timeout=60) as pool:
        # 4 · 40 overflows to -96.
        expected = [[8, 2], [7, 1.75]], [("int8", -96), ("int32", 4)]
        assert pool.run(in_worker_numbers) == [expected] * 2


def in_worker_wrong_reductions(num_replicas):
    s = strategy(num_replicas)
    wrong = kdist.errors.InvalidArgumentError
    scalars = per_replica(s, lambda i: np.float32(i))
    vectors = per_replica(s, lambda i: np.ones(2, "float32"))
    for op in ("MAX", "", None, 3, sum):
        with pytest.raises(wrong, match="reduce_op is not"):
            s.reduce(op, vectors, axis=None)
    for value, axis in ((scalars, 0), (scalars, -1), (vectors, 1), (vectors, -2), (vectors, "rows")):
        with pytest.raises(wrong, match="axis"):
            s.reduce("SUM", value, axis=axis)
        with pytest.raises(wrong, match="axis"):
            s.gather(value, axis=axis)
    with pytest.raises(wrong, match="axis"):
        s.gather(vectors, axis=None)
    if len(s.runtime.devices) > 1:
        # If a short last batch has the rows [1, 1] and [1], the sum must not count the single row twice.
        uneven = per_replica(s, lambda i: np.ones(1 if i else 2, "float32"))
        for op in ("SUM", "MEAN"):
            with pytest.raises(wrong, match="axis=0"):
                s.reduce(op, uneven, axis=None)
        other = per_replica(s, lambda i: np.ones((2, 1 + i), "float32"))
        with pytest.raises(wrong, match="axis other than `axis`"):
            s.gather(other, axis=0)
        ranks = per_replica(s, lambda i: np.ones((2,) * (1 + i), "float32"))
        for call in (lambda: s.gather(ranks, axis=0), lambda: s.reduce("SUM", ranks, axis=None)):
            with pytest.raises(wrong):
                call()
        with pytest.raises(wrong, match="one component per replica"):
            s.reduce("SUM", kdist.DistributedValues([np.ones(2, "float32")]), axis=None)
    return True


@each_cluster
def test_wrong_reductions_are_refused(backend, num_workers, num_replicas):
    assert all(on_workers(backend, num_workers, num_replicas, in_worker_wrong_reductions))


def in_worker_different_values(devices):
    """Reduces and gathers values that differ between two workers, then equal ones."""
    import keras
    from keras import ops

    s = kdist.MultiWorkerMirroredStrategy(devices=devices)
    index = s.runtime.worker_index
    longer, wider = ops.ones(2 + index), ops.ones((2, 2 + index))
    dtype = "float32" if index else "int32"
    replicas = s.experimental_distribute_values_from_function(lambda context: wider)
    calls = [
        lambda: s.reduce("SUM", kdist.DistributedValues([longer] * len(s.runtime.devices)), axis=None),
        lambda: s.reduce("MEAN", replicas, axis=0),
        lambda: s.reduce("SUM", ops.ones(2, dtype), axis=None),
        lambda: s.gather(wider, axis=0),
        lambda: s.gather(ops.ones((2, 2), dtype), axis=0),
    ]
    if keras.backend.backend() != "tensorflow":  # there, a graph gathers, with an error of TensorFlow
        context = kdist.get_replica_context
        calls.append(lambda: s.run(lambda x: context().all_gather(x, axis=0), (replicas,)))
    for call in calls:
        with pytest.raises(
            kdist.errors.WorkerMismatchError, match=r"different shapes or dtypes[\s\S]+axis=0"
        ):
            call()
    return numpy_of(s.reduce("SUM", ops.ones(2), axis=None)).tolist()


@pytest.mark.kills(
    jax_different_values_summed="[jax-2]",
    jax_different_rows_gathered="[jax-1]",
    torch_different_rows_gathered="[torch-1]",
)
@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    ("backend", "num_devices"), [("tensorflow", 1), ("jax", 1), ("torch", 1), ("jax", 2), ("torch", 2)]
)
def test_workers_that_reduce_or_gather_different_values_get_an_error(backend, num_devices):
    devices = [f"cpu:{i}" for i in range(num_devices)]
    with start_pool(2, backend, timeout=60) as pool:
        assert pool.run(in_worker_different_values, devices) == [[2 * num_devices] * 2] * 2


# Gather -----------------------------------------------------------------------------------------------------


def part_of(i, shape, dtype):
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + 10 * i).astype(dtype)


def in_worker_gather(num_replicas):
    s = strategy(num_replicas)
    even = per_replica(s, lambda i: part_of(i, (2, 3), "float32"))
    uneven_rows = per_replica(s, lambda i: part_of(i, (i + 1, 2), "int32"))
    uneven_columns = per_replica(s, lambda i: part_of(i, (2, 3 - i), "float32"))
    flags = per_replica(s, lambda i: np.array([i == 0, i == 1]))
    from_run = s.run(lambda x: x[:, 0] * 2, args=(even,))
    empty_but_first = per_replica(s, lambda i: np.ones((0 if i else 2, 2), "float32"))

    @kdist.function
    def compiled(value, other):
        return s.gather(value, axis=0), s.gather(other, axis=1)

    return numpy_of(
        {
            "axis 0": s.gather(even, axis=0),
            "axis 1": s.gather(even, axis=1),
            "axis -1": s.gather(even, axis=-1),
            "uneven rows": s.gather(uneven_rows, axis=0),
            "uneven columns": s.gather(uneven_columns, axis=1),
            "structure": s.gather({"a": [flags, None], "b": from_run}, axis=0),
            "empty": s.gather(empty_but_first, axis=0),
            "compiled": compiled(uneven_rows, uneven_columns),
        }
    )


@pytest.mark.kills(torch_padding_gathered="torch")
@each_cluster
def test_gather_concatenates(backend, num_workers, num_replicas):
    ids = range(num_replicas)
    even = [part_of(i, (2, 3), "float32") for i in ids]
    uneven = np.concatenate([part_of(i, (i + 1, 2), "int32") for i in ids])
    for found in on_workers(backend, num_workers, num_replicas, in_worker_gather):
        np.testing.assert_array_equal(found["axis 0"], np.concatenate(even))
        for name in ("axis 1", "axis -1"):
            np.testing.assert_array_equal(found[name], np.concatenate(even, axis=1))
        columns = np.concatenate([part_of(i, (2, 3 - i), "float32") for i in ids], axis=1)
        for of_rows, of_columns in ((found["uneven rows"], found["uneven columns"]), found["compiled"]):
            np.testing.assert_array_equal(of_rows, uneven)
            assert of_rows.dtype == "int32"
            np.testing.assert_array_equal(of_columns, columns)
        flags, none = found["structure"]["a"]
        assert flags.tolist() == [i == j for i in ids for j in (0, 1)]
        assert none is None
        np.testing.assert_array_equal(found["structure"]["b"], np.concatenate([2 * x[:, 0] for x in even]))
        np.testing.assert_array_equal(found["empty"], np.ones((2, 2)))


def in_worker_gather_strings(num_replicas):
    s = strategy(num_replicas)
    words = per_replica(s, lambda i: np.array([f"{i}é", "b" * i][: 2 - i % 2]))
    found = numpy_of(s.gather(words, axis=0)).tolist()
    if len(s.runtime.devices) == 1:
        with pytest.raises(kdist.errors.UnsupportedError, match="strings"):
            kdist.function(lambda: s.gather(words, axis=0))()
    return found


@each_cluster_of("tensorflow")  # other backends have no strings
def test_gather_concatenates_strings(backend, num_workers, num_replicas):
    words = [text.encode() for i in range(num_replicas) for text in [f"{i}é", "b" * i][: 2 - i % 2]]
    for found in on_workers(backend, num_workers, num_replicas, in_worker_gather_strings):
        assert found == words
