"""Collectives of workers outside of `run`, checks that variables are in sync, and `KDIST_DEBUG`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run, strategy
from tests.helpers.scripts import wait_until

NUM_WORKERS = 2


def host(value):
    import keras

    return keras.tree.map_structure(
        lambda leaf: keras.ops.convert_to_numpy(leaf) if hasattr(leaf, "shape") else leaf, value
    )


def in_worker_exchange():
    import keras

    import kdist

    index = strategy().runtime.worker_index
    kdist.MultiWorkerMirroredStrategy()  # not kept: the process remains in the cluster
    gc.collect()
    objects = kdist.all_gather_object({"loss": 0.5 + index, "tags": ["a", None, (1, True)]})
    arrays = kdist.all_gather_object(keras.ops.ones((index + 1, 2)))
    x = (np.arange(3) * (index + 1)).astype(">i4")
    seeds = {(index, (1, "a")): np.array([2**40 + index, -1])}
    sent = kdist.broadcast({"x": x, "name": f"worker {index}", "seeds": seeds}, source=np.int64(1))
    kdist.barrier("first")
    kdist.barrier("second", timeout=60)
    errors = []
    for wrong in (
        lambda: kdist.all_gather_object({1, 2} if index else 1),
        lambda: kdist.broadcast(1, source=2),
        lambda: kdist.all_gather_object({"day": np.datetime64("2026-01-31")}),
    ):
        with pytest.raises(kdist.errors.InvalidArgumentError) as caught:
            wrong()
        errors.append(str(caught.value))
    with pytest.raises(kdist.errors.WorkerMismatchError) as caught:
        kdist.barrier(f"barrier {index}")
    return objects, arrays, host(sent), errors, str(caught.value)


@pytest.mark.kills(broadcast_drops_bits="[jax]", dates_called_sparse="[torch]", keys_of_tuples_lost="[torch]")
@each_backend
def test_workers_exchange_objects_and_values(backend):
    results = run(backend, NUM_WORKERS, in_worker_exchange)
    for index, (objects, arrays, sent, errors, barrier) in enumerate(results):
        assert objects == [{"loss": 0.5 + i, "tags": ["a", None, (1, True)]} for i in range(2)]
        assert [array.tolist() for array in arrays] == [[[1, 1]], [[1, 1], [1, 1]]]
        assert sent["x"].tolist() == [0, 2, 4] and sent["name"] == "worker 1"
        assert {key: seed.tolist() for key, seed in sent["seeds"].items()} == {(1, (1, "a")): [2**40 + 1, -1]}
        assert ("set" if index else "worker 1") in errors[0]
        assert "source=2" in errors[1]
        assert "'Cannot send an array of datetime64[D] to other workers'" in errors[2]
        assert "barrier 0" in barrier and "barrier 1" in barrier


def in_worker_wait(folder):
    import kdist

    given_up, come = Path(folder) / "given-up", Path(folder) / "come"
    if strategy().runtime.worker_index == 1:
        wait_until(given_up.exists)
        kdist.barrier("late")
        come.touch()
        return ""
    with pytest.raises(kdist.errors.WorkerTimeoutError) as caught:
        kdist.barrier("late", timeout=0.5)
    given_up.touch()
    wait_until(come.exists)
    return str(caught.value)


@pytest.mark.kills(barrier_left_out="[torch]")
@each_backend
def test_a_barrier_with_a_timeout_says_which_it_was(backend, tmp_path):
    said, _ = run(backend, NUM_WORKERS, in_worker_wait, str(tmp_path))
    assert "'late'" in said and "0.5 s" in said


def in_worker_alone():
    """Returns values of a process without a cluster, first without a strategy, then with one."""
    import keras

    import kdist

    kdist.barrier()
    with pytest.raises(kdist.errors.InvalidArgumentError, match="index of a worker"):
        kdist.broadcast(1, source=1)
    results = []
    for own in (None, strategy()):
        x, v = np.ones(2, "float32"), keras.Variable(1.0)
        sent = kdist.broadcast({"x": x, "name": "me"}, strategy=own)
        gathered = kdist.all_gather_object([x, v, 3], strategy=own)
        x += 1
        v.assign(2.0)
        types = [keras.ops.is_tensor(sent["x"]), *(type(leaf).__name__ for leaf in gathered[0])]
        for send in (kdist.broadcast, kdist.all_gather_object):
            with pytest.raises(kdist.errors.InvalidArgumentError, match="'set'"):
                send({1, 2}, strategy=own)
        results.append((host(sent), gathered, types))
    return results


@pytest.mark.kills(lone_worker_skips_the_exchange="[torch]")
@each_backend
def test_one_worker_gets_the_types_and_errors_of_several_workers(backend):
    for sent, gathered, types in run(backend, 1, in_worker_alone)[0]:
        assert sent["x"].tolist() == [1, 1] and sent["name"] == "me"
        assert [np.asarray(leaf).tolist() for leaf in gathered[0]] == [[1, 1], 1, 3] and len(gathered) == 1
        assert types == [True, "ndarray", "ndarray", "int"]


def in_worker_create():
    import keras

    import kdist

    chosen = strategy()
    index = chosen.runtime.worker_index
    keras.utils.set_random_seed(index)
    with chosen.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
        model.compile("adam", "mse")
        own = keras.Variable(np.full(2, float(index), "float32"))
    kernel = host(model.trainable_variables[0].value)
    kdist.experimental.check_in_sync(model)
    if index == 1:
        model.trainable_variables[1].assign(np.array([0, 0, 2, 0], "float32"))
    said = []
    for value in (model, model.variables, [own]):
        try:
            kdist.experimental.check_in_sync(value)
            said.append("")
        except kdist.errors.WorkerMismatchError as error:
            said.append(str(error))
    with pytest.raises(kdist.errors.WorkerMismatchError) as caught, chosen.scope():
        keras.Variable(np.zeros(2 + index, "float32"))
    return kernel, host(own.value), said, str(caught.value)


@pytest.mark.kills(variables_of_a_scope_not_shared="[torch]")
@each_backend
def test_variables_of_a_scope_start_with_the_values_of_the_chief(backend):
    (kernel, own, said, shapes), other = run(backend, NUM_WORKERS, in_worker_create)
    assert np.abs(kernel).sum() > 0
    np.testing.assert_array_equal(kernel, other[0])
    assert own.tolist() == other[1].tolist() == [0, 0]
    for text in said[:2]:
        assert "bias" in text and "worker 1" in text and "by up to 2" in text
    assert said[2] == ""
    assert "variable 0" in shapes and "2" in shapes and "3" in shapes


def in_worker_collectives(case, compiled):
    import keras

    import kdist

    chosen = strategy()
    index = chosen.runtime.worker_index
    ops = keras.ops

    def step(x):
        context = kdist.get_replica_context()
        total = context.all_reduce("SUM", x)
        if case == "one more" and index == 1:
            context.all_reduce("SUM", ops.ones(3))
        if case == "shapes":
            context.all_reduce("SUM", ops.ones(3 + index))
        return total

    def train(x):
        return chosen.run(step, args=(x,))

    if compiled:
        train = kdist.function(train)
    os.environ["KDIST_DEBUG"] = "1"
    try:
        if case == "order" and index == 1:
            chosen.reduce("SUM", ops.ones(4), axis=None)
        return [host(train(ops.arange(4.0) + 3 * index)).tolist() for _ in range(2)]
    except kdist.errors.WorkerMismatchError as error:
        return str(error)
    finally:
        del os.environ["KDIST_DEBUG"]


@each_backend
@pytest.mark.parametrize("case", ["none", "one more", "shapes", "order"])
@pytest.mark.parametrize("compiled", [True, False])
def test_under_kdist_debug_a_worker_at_another_collective_is_named_with_its_line(backend, case, compiled):
    for result in run(backend, NUM_WORKERS, in_worker_collectives, case, compiled):
        if case == "none":
            assert result == [[3, 5, 7, 9]] * 2
            continue
        assert "worker_0=" in result and "worker_1=" in result
        assert result.count("collectives_multi_process_test.py:") == 2
        assert {"one more": "end of the function", "shapes": "[4]", "order": "Strategy.reduce(SUM"}[
            case
        ] in result


def in_worker_extended():
    import keras

    import kdist

    chosen = strategy()
    with chosen.scope():
        v = keras.Variable(np.ones(2, "float32"))
        outside = []
    outside.append(keras.Variable(np.ones(2, "float32")))
    extended = chosen.extended
    ids = chosen.experimental_distribute_values_from_function(
        lambda context: keras.ops.convert_to_tensor(float(context.replica_id_in_sync_group + 1))
    )
    total = extended.reduce_to("SUM", ids, destinations=v)
    means = extended.batch_reduce_to("MEAN", [(ids, v), (ids, v)])
    with extended.colocate_vars_with(v):
        extended.update(v, lambda var, x: var.assign(var + x), args=(total,))
    both = (extended, kdist.get_strategy().extended)
    created = [one.variable_created_in_scope(x) for one in both for x in (v, outside[0])]
    names = [*extended.worker_devices, *extended.parameter_devices, *extended.non_slot_devices([v])]
    assert extended.value_container(v) is v and not extended.experimental_require_static_shapes
    return host(total), host(means), host(v.value), created, names


@pytest.mark.kills(default_strategy_creates_no_variables="[1-torch]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_extended_parts_of_a_strategy(backend, num_workers):
    for total, means, value, created, names in run(backend, num_workers, in_worker_extended):
        assert total == 3 and means == [1.5, 1.5]
        assert np.asarray(value).tolist() == [4, 4]
        assert created == [True, False, False, True]
        assert len(names) == (6 if num_workers == 1 else 3) and all(name.startswith("cpu") for name in names)


def in_worker_transposed():
    """Returns the error of a sum of tensors with equal sizes and different shapes, and the result of the next sum."""
    import keras

    import kdist

    s = strategy()
    shape = (2, 3) if s.runtime.worker_index else (3, 2)

    def total(x):
        return kdist.get_replica_context().all_reduce("SUM", x)

    with pytest.raises(kdist.errors.WorkerMismatchError) as caught:
        s.run(total, args=(keras.ops.ones(shape),))
    return str(caught.value), host(s.run(total, args=(keras.ops.ones(2),)))


@pytest.mark.kills("shared_memory_of_different_shapes")
@each_backend
def test_a_sum_of_different_shapes_is_an_error(backend):
    for error, total in run(backend, NUM_WORKERS, in_worker_transposed):
        assert "2, 3" in error and "3, 2" in error
        np.testing.assert_array_equal(total, [2, 2])
