"""The snippets of TensorFlow's guide and API page, which are in `snippets.md`, work on every backend.

They run unchanged, and the tests compute the results by hand. Under every strategy of the guide, they also
run with different rows instead of rows of ones, so that a lost, doubled or swapped row changes the results.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from tests.guide.playing import SECTIONS, play, play_all
from tests.helpers.processes import each_backend, run, run_plain

KERAS, LOOPS, API = (
    "Guide: Keras",
    "Guide: custom training loops",
    "API page: MultiWorkerMirroredStrategy (workers)",
)
ON_WORKERS = [title for title in SECTIONS if title.endswith("(workers)")]
LISTED = [title for title in SECTIONS if title not in ON_WORKERS]
ONES = [(np.ones((10, 1)), np.ones((10, 1)))]


def descend(start, steps, slope_of, rate):
    """Computes by hand the loss of each step, and the weights after it."""
    kernel, bias = (np.array(w, "float64") for w in start)
    losses, weights = [], []
    for x, y in steps:
        loss, slope = slope_of(x @ kernel + bias, y)
        kernel, bias = kernel - rate * x.T @ slope / len(x), bias - rate * slope.mean(axis=0)
        losses.append(np.mean(loss))
        weights.append(np.append(kernel, bias))
    return losses, weights


def squares(z, y):
    return (z - y) ** 2, 2 * (z - y)


def binary(z, y):
    return np.logaddexp(0, z) - y * z, 1 / (1 + np.exp(-z)) - y


def softmax(z, y):
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    chosen = np.eye(p.shape[1])[y[:, 0]]
    return -np.log((p * chosen).sum(axis=1)), p - chosen


def same(weights, by_hand):
    np.testing.assert_allclose(np.concatenate([np.ravel(w) for w in weights]), by_hand, rtol=1e-5, atol=1e-6)


@each_backend
def test_every_snippet_of_the_guide(backend):
    found: dict[str, Any] = run(backend, 1, play_all, LISTED)[0]
    assert found["Guide: MirroredStrategy"] == [2]
    assert found["Guide: TPUStrategy"] == [backend == "jax"]
    assert found["Guide: other strategies"] == [True, 1.0, 1.0]

    start, two_epochs, evaluated, two_more, weights, num_batches, rate = found[KERAS]
    losses, by_hand = descend(start, 41 * ONES, squares, 0.01)
    assert [*two_epochs, *two_more] == pytest.approx(np.reshape(losses[:40], (4, 10)).mean(axis=1), rel=1e-4)
    assert evaluated == pytest.approx(losses[20], rel=1e-4)
    same(weights, by_hand[39])
    assert (num_batches, rate) == (10, 0.15)

    start, after_an_epoch, after_ten_more = found[LOOPS]
    _, by_hand = descend(start, 20 * ONES, binary, 0.01)
    same(after_an_epoch, by_hand[9])
    same(after_ten_more, by_hand[19])

    start, after_ten = found["Guide: Estimator"]
    same(after_ten, descend(start, 10 * ONES, squares, 0.01)[1][-1])

    hosts = [f"host{i}:2222" for i in range(1, 6)]
    assert found["Guide: TF_CONFIG"] == [{"worker": hosts[:3], "ps": hosts[3:]}, ["worker", 1]]
    here = ["localhost:12345", "localhost:23456"]
    assert found["API page: TF_CONFIG"] == [{"worker": here}, ["worker", 0]]


@pytest.mark.kills(snippet_of_another_backend_not_told="[1-torch]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_snippet_for_several_workers(backend, num_workers):
    found = run(backend, num_workers, play_all, ON_WORKERS)
    rows = [one[API][0] for one in found]
    # Each worker's dataset yields its two rows in turn, one per step.
    steps = [[np.concatenate([mine[part][[i]] for mine in rows]) for part in (0, 1)] for i in (0, 1)]
    for one in found:
        assert one["Guide: MultiWorkerMirroredStrategy (workers)"] == [num_workers, num_workers]
        _, start, two_epochs, weights, before, after = one[API]
        losses, by_hand = descend(start, 10 * steps, softmax, 0.1)
        assert two_epochs == pytest.approx(np.reshape(losses, (2, 10)).mean(axis=1), rel=1e-5)
        same(weights, by_hand[-1])
        same(after, descend(before, 2 * steps, softmax, 0.1)[1][-1])


# Different rows --------------------------------------------------------------------------------------------------


def rows():
    draw = np.random.RandomState(8)
    return draw.rand(100, 1).astype("float32"), draw.rand(100, 1).astype("float32")


DIFFER = {
    "tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100)": "tf.data.Dataset.from_tensor_slices(rows())",
    "np.ones((100, 1)), np.ones((100, 1))": "rows()",
}
TWO_DEVICES = 'kdist.MirroredStrategy(["cpu:0", "cpu:1"])'
ONE_WORKER = (
    "kdist.MirroredStrategy()",  # as in the guide: all available devices
    TWO_DEVICES,
    'kdist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=kdist.HierarchicalCopyAllReduce())',
    'kdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])',
    'kdist.OneDeviceStrategy(device="/cpu:0")',
    "kdist.get_strategy()",
)
SEVERAL = (
    "kdist.MultiWorkerMirroredStrategy()",
    "kdist.experimental.MultiWorkerMirroredStrategy()",
    "kdist.experimental.MultiWorkerMirroredStrategy(kdist.experimental.CollectiveCommunication.RING)",
)


class Nothing:
    """Replaces a strategy, to run the same code without it."""

    scope = contextlib.nullcontext
    num_replicas_in_sync = 2


def fit_under(strategies):
    """Returns the losses of the guide's `fit` and `evaluate` under each strategy."""
    found = {}
    for strategy in strategies:
        changes = DIFFER | {TWO_DEVICES: "nothing", "kdist.MirroredStrategy()": strategy}
        _, two_epochs, evaluated, two_more, *_ = play(KERAS, changes, rows=rows, nothing=Nothing())
        found[strategy] = [*two_epochs, evaluated, *two_more]
    return found


@pytest.mark.kills(rows_of_the_guide_trained_twice="[1-torch]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_fit(backend, num_workers):
    expected = run_plain(backend, fit_under, ["nothing"])["nothing"]
    assert expected[0] > expected[-1] > 0
    strategies = SEVERAL if num_workers > 1 else ONE_WORKER + SEVERAL
    for found in run(backend, num_workers, fit_under, strategies):
        for strategy, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-5), strategy


def loops(strategy):
    """Runs the guide's loop, and on TensorFlow also the loop with `tf.GradientTape`, with one new name."""
    import keras

    changes = [DIFFER | {TWO_DEVICES: strategy}]
    if keras.backend.backend() == "tensorflow":
        changes.append(changes[0] | {"keras.losses.Reduction.NONE": '"none"'})
    return [play(LOOPS, change, rows=rows) for change in changes]


@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_loops(backend, num_workers):
    batches = [[part[i : i + 10] for part in rows()] for i in range(0, 100, 10)]
    for found in run(backend, num_workers, loops, TWO_DEVICES if num_workers == 1 else SEVERAL[0]):
        for start, after_an_epoch, after_ten_more in found:
            _, by_hand = descend(start, 2 * batches, binary, 0.01)
            same(after_an_epoch, by_hand[9])
            same(after_ten_more, by_hand[19])


def input_of_the_guide():
    """Returns the rows of each replica in the guide's loop: by iteration, by `next`, and from arrays."""
    import keras
    import tensorflow as tf

    import kdist

    mirrored_strategy = kdist.MirroredStrategy(["/cpu:0", "/cpu:1"])
    dataset = tf.data.Dataset.from_tensor_slices(rows()).batch(5 * mirrored_strategy.num_replicas_in_sync)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    seen = [mirrored_strategy.experimental_local_results(dist_inputs) for dist_inputs in dist_dataset]
    iterator = iter(dist_dataset)
    seen += [mirrored_strategy.experimental_local_results(next(iterator)) for _ in range(10)]

    numpy_dataset = mirrored_strategy.make_experimental_numpy_dataset(rows())
    for dist_inputs in mirrored_strategy.experimental_distribute_dataset(numpy_dataset.batch(10)):
        seen.append(mirrored_strategy.experimental_local_results(dist_inputs))
    return keras.tree.map_structure(keras.ops.convert_to_numpy, seen)


@pytest.mark.kills(rows_of_the_guide_swapped="[torch]")
@each_backend
def test_the_input_of_loops(backend):
    seen = run(backend, 1, input_of_the_guide)[0]
    x, y = rows()
    assert len(seen) == 10 + 10 + 10
    for number, replicas in enumerate(seen):
        assert len(replicas) == 2
        for i, (replica_x, replica_y) in enumerate(replicas):
            first = 10 * (number % 10) + 5 * i  # in order, the first rows for the first replica
            np.testing.assert_array_equal(replica_x, x[first : first + 5])
            np.testing.assert_array_equal(replica_y, y[first : first + 5])
