"""`Strategy.run`: arguments, results, the context of a replica, and errors."""

from __future__ import annotations

import types

import numpy as np
import pytest

import kdist
from tests.helpers.processes import each_backend, run, strategy
from tests.loops.clusters import each_cluster, local_results, numpy_of, on_replicas, on_workers, per_replica

# Arguments and results --------------------------------------------------------------------------------------


def in_worker_arguments(num_replicas):
    import keras

    s = strategy(num_replicas)
    tens = per_replica(s, lambda i: np.float32(10 * i))
    pairs = per_replica(s, lambda i: {"left": np.full(2, i, "int32"), "right": [np.float32(i)]})

    def fn(first, factor, nothing, *, name, length, flag, more):
        number, options = first
        assert nothing is None and more["none"] is None and name == "kdist" and flag is True
        return {
            "sum": number + options["y"] * factor,
            "more": [more["pairs"]["left"] + 1, None, (more["pairs"]["right"][0],)],
            "zeros": keras.ops.zeros((length,)),  # a length must be a Python number
            "name": name,
        }

    result = s.run(
        fn,
        args=((tens, {"y": np.array([1, 2], "float32")}), 3.0, None),
        kwargs={"name": "kdist", "length": 2, "flag": True, "more": {"pairs": pairs, "none": None}},
        options=kdist.RunOptions(),
    )
    return local_results(s, result)


@each_cluster
def test_arguments_and_results_are_structures(backend, num_workers, num_replicas):
    for i, result in enumerate(on_replicas(backend, num_workers, num_replicas, in_worker_arguments)):
        np.testing.assert_array_equal(result["sum"], [10 * i + 3, 10 * i + 6])
        np.testing.assert_array_equal(result["more"][0], [i + 1, i + 1])
        assert result["more"][0].dtype == "int32"
        assert result["more"][1] is None
        assert result["more"][2] == (i,)
        np.testing.assert_array_equal(result["zeros"], [0, 0])
        assert result["name"] == "kdist"


def in_worker_types(num_replicas):
    import keras

    s = strategy(num_replicas)
    tensor, none, text, list_ = s.run(lambda: (keras.ops.ones(2), None, "text", []))
    number_of_local = len(s.runtime.devices)
    assert (none, text, list_) == (None, "text", [])
    if number_of_local == 1:
        assert keras.ops.is_tensor(tensor)
    else:
        assert isinstance(tensor, kdist.DistributedValues)
        assert all(keras.ops.is_tensor(part) for part in tensor.values)
        assert "PerReplica" in repr(tensor) and "0:" in repr(tensor)
    parts = s.experimental_local_results(tensor)
    assert isinstance(parts, tuple) and len(parts) == number_of_local
    assert s.experimental_local_results("plain") == ("plain",)
    assert s.run(lambda: None) is None
    if keras.backend.backend() == "jax":
        return [str(next(iter(part.devices()))) for part in parts]
    return [str(part.device) for part in parts]


@each_cluster
def test_a_result_has_one_component_a_local_replica(backend, num_workers, num_replicas):
    for devices in on_workers(backend, num_workers, num_replicas, in_worker_types):
        assert len(devices) == num_replicas // num_workers
        if backend != "torch":  # PyTorch has one CPU device
            assert len(set(devices)) == len(devices), "each component lies on the device of its replica"


def in_worker_datasets(num_replicas, batch_sizes):
    import keras

    s = strategy(num_replicas)
    rows = np.arange(3 * sum(batch_sizes), dtype="float32").reshape(-1, 3)
    ends = np.cumsum(batch_sizes)

    def batches():
        for size, end in zip(batch_sizes, ends, strict=True):
            yield {"x": rows[end - size : end]}

    def fn(batch, factor):
        return keras.ops.sum(batch["x"], axis=1) * factor

    global_batches = [
        numpy_of(s.gather(s.run(fn, args=(batch, 2.0)), axis=0))
        for batch in s.experimental_distribute_dataset(batches)
    ]

    def dataset_fn(context):
        mine = context.input_pipeline_id
        return [{"x": np.full((2, 3), i * context.num_input_pipelines + mine, "float32")} for i in range(3)]

    own_batches = [
        numpy_of(s.gather(s.run(fn, args=(batch, 1.0)), axis=0))
        for batch in s.distribute_datasets_from_function(dataset_fn)
    ]
    return global_batches, own_batches


@each_cluster
def test_datasets_give_each_replica_its_rows(backend, num_workers, num_replicas):
    sizes = (6, 6, 5)  # no number of replicas divides the last size
    for found, own in on_workers(backend, num_workers, num_replicas, in_worker_datasets, sizes):
        expected = np.arange(51, dtype="float32").reshape(-1, 3).sum(1) * 2
        np.testing.assert_array_equal(np.concatenate(found), expected)
        assert [len(batch) for batch in found] == list(sizes)
        if num_workers == 2:  # each step takes the next batch of each pipeline
            assert [batch.tolist() for batch in own] == [[0, 0, 3, 3], [6, 6, 9, 9], [12, 12, 15, 15]]
        else:
            assert np.concatenate(own)[:6].tolist() == [0, 0, 3, 3, 6, 6]


# The context of a replica -----------------------------------------------------------------------------------


def in_worker_context(num_replicas):
    import keras

    s = strategy(num_replicas)
    seen = []

    def fn():
        context = kdist.get_replica_context()
        assert isinstance(context, kdist.ReplicaContext)
        assert context.strategy is s and kdist.get_strategy() is s
        assert context.num_replicas_in_sync == num_replicas
        assert kdist.has_strategy() and not kdist.in_cross_replica_context()
        assert isinstance(context.devices, tuple)
        seen.append(context.devices)
        return keras.ops.convert_to_tensor(context.replica_id_in_sync_group)

    with s.scope():
        ids = s.run(fn)
        assert kdist.in_cross_replica_context() and kdist.get_replica_context() is None
    assert not kdist.in_cross_replica_context() and not kdist.has_strategy()
    outside = kdist.get_replica_context()
    assert outside.replica_id_in_sync_group == 0 and outside.num_replicas_in_sync == 1
    assert outside.strategy is kdist.get_strategy() is not s
    s.run(fn)
    assert {name for names in seen for name in names} == set(s.runtime.devices)
    if keras.backend.backend() != "jax":  # on JAX, one program runs on all devices
        assert seen == [(name,) for name in s.runtime.devices] * 2
    return [int(part) for part in local_results(s, ids)]


@each_cluster
def test_a_replica_knows_where_it_runs(backend, num_workers, num_replicas):
    assert on_replicas(backend, num_workers, num_replicas, in_worker_context) == [*range(num_replicas)]


# Errors -----------------------------------------------------------------------------------------------------


def in_worker_nested(num_replicas):
    s = strategy(num_replicas)
    value = np.ones(2, "float32")
    forbidden = {
        "run": lambda: s.run(lambda: None),
        "reduce": lambda: s.reduce("SUM", value, axis=None),
        "gather": lambda: s.gather(value, axis=0),
        "scope": lambda: s.scope().__enter__(),
    }
    for name, call in forbidden.items():
        for called in (call, kdist.function(call)):
            with pytest.raises(kdist.errors.StrategyScopeError, match=name) as caught:
                s.run(lambda called=called: called())
            assert isinstance(caught.value, RuntimeError)
    assert not kdist.has_strategy()


@each_cluster
def test_what_speaks_for_all_replicas_is_refused_inside_of_one(backend, num_workers, num_replicas):
    on_workers(backend, num_workers, num_replicas, in_worker_nested)


class Strange(Exception):
    """A user's exception, whose constructor needs two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.second = second


def in_worker_failure(num_replicas):
    import keras

    s = strategy(num_replicas)

    def fail(x, kind):
        raise kind("wrong rows") if kind is not Strange else Strange("wrong", "rows")

    def fail_last(x):
        if kdist.get_replica_context().replica_id_in_sync_group == num_replicas - 1:
            raise OSError("the last one")
        return x

    @kdist.function
    def compiled(kind):
        return s.run(fail, args=(values, kind))

    even = per_replica(s, lambda i: np.ones(2, "float32"))
    uneven = per_replica(s, lambda i: np.ones(2 + i, "float32"))
    first = s.runtime.replica_ids[0]
    for values in (even, uneven):
        for call in (lambda kind: s.run(fail, args=(values, kind)), compiled):  # noqa: B023  # called at once
            for kind in (ValueError, KeyError, Strange):
                with pytest.raises(kind, match=r"wrong.*rows") as caught:
                    call(kind)
                assert type(caught.value) is kind
            assert caught.value.second == "rows"
            notes = " ".join(caught.value.__notes__)
            assert f"replica {first} ({s.runtime.devices[0]})" in notes or "all replicas" in notes
    assert not kdist.has_strategy()
    if keras.backend.backend() != "jax" and num_replicas == len(s.runtime.devices):
        with pytest.raises(OSError, match="the last one") as caught:
            s.run(fail_last, args=(even,))
        assert f"replica {num_replicas - 1} (cpu:{num_replicas - 1})" in " ".join(caught.value.__notes__)
    return local_results(s, s.run(lambda x: x + 1, args=(even,)))


@each_cluster
def test_an_exception_comes_out_with_its_type_and_its_replica(backend, num_workers, num_replicas):
    for result in on_replicas(backend, num_workers, num_replicas, in_worker_failure):
        np.testing.assert_array_equal(result, [2, 2])  # the strategy still works


def in_worker_different_structures(num_replicas):
    import keras

    s = strategy(num_replicas)

    def fn():
        x = keras.ops.ones(())
        return (x,) if kdist.get_replica_context().replica_id_in_sync_group == 0 else {"x": x}

    with pytest.raises(kdist.errors.InvalidArgumentError, match="different structures"):
        s.run(fn)

    def none_on_one():
        return None if kdist.get_replica_context().replica_id_in_sync_group == 0 else keras.ops.ones(())

    result = s.run(none_on_one)
    return [value is None for value in result.values]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    "backend",  # on JAX, one program for all replicas cannot return different structures
    ["tensorflow", "torch"],
)
def test_replicas_return_the_same_structure(backend, num_replicas):
    found = run(backend, 1, in_worker_different_structures, num_replicas)[0]
    assert found == [True] + [False] * (num_replicas - 1)


def in_worker_wrong_arguments(num_replicas):
    s = strategy(num_replicas)
    x = per_replica(s, lambda i: np.ones(2, "float32"))
    wrong = kdist.errors.InvalidArgumentError
    with pytest.raises(wrong, match="tuple"):
        s.run(lambda x: x, args=x)
    with pytest.raises(wrong, match="tuple"):
        s.run(lambda x: x, args=np.ones(2))
    with pytest.raises(wrong, match="`fn` is not a function"):
        s.run("fn")
    with pytest.raises(wrong, match="kwargs"):
        s.run(lambda x: x, kwargs=[1])
    with pytest.raises(TypeError):
        s.run(lambda x: x)
    if len(s.runtime.devices) > 1:
        for number in (1, len(s.runtime.devices) + 1):
            with pytest.raises(wrong, match="one component per replica"):
                s.run(lambda x: x, args=(kdist.DistributedValues([np.ones(2, "float32")] * number),))
    # `args` can also be a list, and options are hints.
    options = kdist.RunOptions(experimental_enable_dynamic_batch_size=False)
    return local_results(s, s.run(lambda x, y: x + y, [x], {"y": 1.0}, options))


@each_cluster
def test_wrong_arguments_are_refused(backend, num_workers, num_replicas):
    for result in on_replicas(backend, num_workers, num_replicas, in_worker_wrong_arguments):
        np.testing.assert_array_equal(result, [2, 2])


# The default strategy ---------------------------------------------------------------------------------------


def in_worker_default():
    default = kdist.get_strategy()
    x = np.array([[1, 2], [3, 6]], "float32")
    assert default.run(lambda a, b: (a, b), args=(1,), kwargs={"b": "two"}) == (1, "two")
    assert default.run(kdist.get_replica_context).strategy is default
    assert default.reduce("SUM", 1.0, axis=None) == 1.0
    assert default.reduce(kdist.ReduceOp.MEAN, {"a": 2.0}, axis=None) == {"a": 2.0}
    for op in ("max", None):
        with pytest.raises(kdist.errors.InvalidArgumentError, match="reduce_op"):
            default.reduce(op, x, axis=None)
    context = kdist.get_replica_context()
    merged = context.merge_call(lambda s, a, b: (s is default, a, b), args=(1,), kwargs={"b": 2})
    assert merged == (True, 1, 2)
    assert default.experimental_local_results(x)[0] is x
    return numpy_of(
        {
            "sum": default.reduce("sum", x, axis=0),
            "mean": default.reduce("MEAN", (x,), axis=1)[0],
            "gather": default.gather(x, axis=0),
            "all_reduce": context.all_reduce("MEAN", [x])[0],
            "all_gather": context.all_gather(x, axis=1),
        }
    )


@each_backend
def test_the_default_strategy_has_one_replica(backend):
    found = run(backend, 1, in_worker_default)[0]
    x = [[1, 2], [3, 6]]
    np.testing.assert_array_equal(found["sum"], [4, 8])
    np.testing.assert_array_equal(found["mean"], [1.5, 4.5])
    for name in ("gather", "all_reduce", "all_gather"):
        np.testing.assert_array_equal(found[name], x)


MODULE = """
traces, numpy = 0, {}

def step():
    global traces
    traces += 1
    assert not keep.numpy  # an attribute, which has nothing to do with the global name
    counter.assign_add(1.0)
    return add(counter * factor)

def add(value):
    return value + added
"""


def in_worker_other_objects(num_replicas):
    """Changes global names of a function between calls; returns results and the number of later traces."""
    import keras

    names = {"__name__": "a_notebook", "keep": types.SimpleNamespace(numpy=None)}
    exec(MODULE, names)
    found = []
    with strategy(num_replicas).scope():
        counters = [keras.Variable(10.0 * i, aggregation="mean") for i in range(3)]
    for counter, factor, added in zip(counters, (2.0, 3.0, 3.0), (100, 100, 200), strict=True):
        names |= {"counter": counter, "factor": factor, "added": np.float32(added)}
        results = strategy(num_replicas).run(names["step"])
        (value, *_) = strategy(num_replicas).experimental_local_results(results)
        found.append((float(value), [float(c) for c in counters]))
    names["numpy"]["self"] = names["numpy"]
    before = names["traces"]
    for _ in range(3):
        names["numpy"] = {"other": np.zeros(3)}
        strategy(num_replicas).run(names["step"])
    return found, names["traces"] - before


@pytest.mark.kills("jax_counters_compile_again", "jax_globals_of_the_first_call")
@each_cluster
def test_a_function_works_on_what_its_names_mean_now(backend, num_workers, num_replicas):
    for found, traces in run(backend, num_workers, in_worker_other_objects, num_replicas):
        # JAX does not recompile it for its own counter, or for a name that it uses only as an attribute.
        assert traces == (0 if backend == "jax" else 3 * num_replicas // num_workers)
        assert found == [
            (102.0, [1.0, 10.0, 20.0]),
            (133.0, [1.0, 11.0, 20.0]),
            (263.0, [1.0, 11.0, 21.0]),
        ]
