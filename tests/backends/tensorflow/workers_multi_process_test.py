"""Workers on TensorFlow: their messages, sums and variables, and errors that name another worker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.processes import run, strategy

pytestmark = pytest.mark.xdist_group("pool-tensorflow")


def exchange():
    import tensorflow as tf

    workers = strategy().runtime.group
    me = workers.worker_index
    sizes = (0, 1, 57, 60, 61, 5000)
    messages = [
        workers.all_gather_bytes(bytes([1 + me]) * (size if me else 60 - min(size, 60))) for size in sizes
    ]
    sums = {}
    for dtype in ("uint8", "int16", "bool", "float64", "bfloat16", "int64"):
        values = tf.cast(tf.constant([[1, 0], [me, 100]]), dtype)
        total = workers.sum(values)
        sums[dtype] = (total.dtype.name, tf.cast(total, tf.float64).numpy().tolist())
    uneven = workers.all_gather_rows(tf.fill([1 + 2 * me, 2], 1.5 + me), [1, 3]).numpy()
    return messages, sums, uneven


def test_messages_of_any_length_and_sums_of_any_dtype():
    first, second = run("tensorflow", 2, exchange)
    messages, sums, uneven = first
    for size, (chief, other) in zip((0, 1, 57, 60, 61, 5000), messages, strict=True):
        assert chief == b"\1" * (60 - min(size, 60))
        assert other == b"\2" * size
    total = [[2.0, 0.0], [1.0, 200.0]]
    assert sums.pop("bool") == ("bool", [[1.0, 0.0], [1.0, 1.0]])
    assert sums == {dtype: (dtype, total) for dtype in ("uint8", "int16", "float64", "bfloat16", "int64")}
    assert uneven.tolist() == [[1.5, 1.5], [2.5, 2.5], [2.5, 2.5], [2.5, 2.5]]
    assert first[0] == second[0]
    np.testing.assert_array_equal(uneven, second[2])


def create_alone():
    """Creates a variable only on the chief, then copies its values of other variables to all workers."""
    import keras

    runtime = strategy().runtime
    me = runtime.worker_index
    with runtime.scope():
        alone = keras.Variable([8.0]) if me == 0 else None
        variables = [
            keras.Variable([1.25 + me, 2.0], dtype="float64"),
            keras.Variable(3 + me, dtype="int32"),
            keras.Variable([[True, me == 0]], dtype="bool"),
            keras.Variable([[0.5 + me]], dtype="float32"),
        ]
    runtime.broadcast_variables(variables)
    return alone is None or float(alone.value[0]), [keras.ops.convert_to_numpy(v).tolist() for v in variables]


def test_a_worker_creates_variables_alone_and_the_chiefs_values_reach_all():
    # `tf.distribute` would wait until each worker creates the same variable.
    first, second = run("tensorflow", 2, create_alone)
    assert first == (8.0, [[1.25, 2.0], 3, [[True, True]], [[0.5]]])
    assert second == (True, first[1])


def explain():
    import tensorflow as tf

    from kdist.errors import WorkerLostError

    workers = strategy().runtime.group
    other = 1 - workers.worker_index
    errors = {
        "gone": tf.errors.UnavailableError(None, None, f"/job:worker/replica:0/task:{other} is gone"),
        "why": tf.errors.InternalError(
            None, None, f"/job:worker/task:{other} was aborted by: no memory left"
        ),
        "somebody": tf.errors.AbortedError(None, None, "Collective ops is aborted by: a failure"),
        "nobody": tf.errors.AbortedError(None, None, "no one in particular"),
        "mine": tf.errors.InvalidArgumentError(None, None, "shapes do not match"),
        "at me": ValueError(f"/job:worker/replica:0/task:{workers.worker_index} has bad shapes"),
    }
    explained = {name: workers.explain_failure(error) for name, error in errors.items()}
    lost = {name: isinstance(error, WorkerLostError) for name, error in explained.items()}
    same = {name: error is errors[name] for name, error in explained.items()}
    return lost, same, str(explained["gone"]), str(explained["why"]), workers.names[other]


def test_errors_that_speak_of_another_worker_name_it():
    for lost, same, gone, why, name in run("tensorflow", 2, explain):
        assert [key for key in lost if lost[key]] == ["gone", "why", "somebody"]
        # All workers are running.
        assert [key for key in same if same[key]] == ["nobody", "mine", "at me"]
        assert name in gone
        assert name in why and "no memory left" in why


def join_otherwise():
    import kdist

    raised = []
    for devices in (["cpu:0", "cpu:1"], None):
        try:
            other = kdist.MultiWorkerMirroredStrategy(devices=devices)
            raised.append(other.runtime.group is strategy().runtime.group)
        except kdist.errors.KdistError as error:
            raised.append(str(error))
    return raised


def test_a_worker_has_one_cpu_and_joins_once():
    for too_many, again in run("tensorflow", 2, join_otherwise):
        assert "one CPU" in too_many and "kdist run --num-workers 2" in too_many
        assert again is True  # the workers that have already joined


def in_creator_scope():
    import tensorflow as tf

    asked = []

    def doubling(next_creator, **kwargs):
        asked.append(1)
        kwargs["initial_value"] = 2 * tf.convert_to_tensor(kwargs["initial_value"])
        return next_creator(**kwargs)

    with strategy().scope(), tf.variable_creator_scope(doubling):
        variable = tf.Variable(1.0)
    return len(asked), [float(part) for part in variable.values]


@pytest.mark.kills("tensorflow_creators_asked_again")
def test_the_creator_of_a_users_scope_is_asked_once():
    assert run("tensorflow", 1, in_creator_scope) == [(1, [2.0, 2.0])]
