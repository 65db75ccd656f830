"""`predict` under a strategy returns every output of a model in order, and aggregates the variables that it writes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend, run, run_plain, scope

ROWS = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 0, 0], [8, 9, 0], [2, 0, 0], [1, 1, 1]], "float32")


def counts_rows(under_strategy: bool) -> Any:
    """Predicts with a layer that counts its rows."""
    import keras

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")
            self.last = self.add_weight(shape=(3,), initializer="zeros", trainable=False, aggregation="mean")

        def call(self, x: Any) -> Any:
            self.count.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            self.last.assign(keras.ops.mean(x, axis=0))
            return 2 * x

    with scope(under_strategy):
        layer = Counting()
        model = keras.Sequential([keras.Input((3,)), layer])
    predicted = model.predict(ROWS, batch_size=4, verbose=0)
    return predicted, float(layer.count), layer.last.numpy(), model.predict_on_batch(ROWS[:5])


@pytest.mark.kills(tensorflow_predict_not_aggregated="[1-tensorflow]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_layer_writes_is_aggregated(backend: str, num_workers: int) -> None:
    expected = run_plain(backend, counts_rows, False)
    assert expected[1] == 7.0  # counted before `predict_on_batch`
    for actual in run(backend, num_workers, counts_rows, True):
        assert_close(actual, expected, atol=0)


def ragged(under_strategy: bool) -> Any:
    """Predicts rows of different lengths, and batches that are padded to different lengths."""
    import keras
    import tensorflow as tf

    class Unpadded(keras.Model):
        def call(self, x: Any) -> Any:
            return {"ragged": tf.RaggedTensor.from_tensor(x, padding=0.0), "sum": tf.reduce_sum(x, axis=1)}

    class Same(keras.Model):
        def call(self, x: Any) -> Any:
            return x + 0.0

    with scope(under_strategy):
        unpadded, same = Unpadded(), Same()
    first = unpadded.predict(ROWS, batch_size=3, verbose=0)
    batches = [ROWS[:3], ROWS[3:5, :2]]

    def generator() -> Any:
        yield from ((batch,) for batch in batches)

    second = same.predict(generator(), verbose=0)
    # Many batches, of which the first ones have equal lengths, and the last ones others.
    longer = tf.data.Dataset.range(13).map(lambda i: tf.ones((1, 3 if i < 5 else 2)))
    many = same.predict(longer, verbose=0)
    third = unpadded.predict_on_batch(ROWS[:3])["ragged"]
    # Fewer rows than replicas, and the rows are empty.
    empty = unpadded.predict(0 * ROWS[:1], verbose=0)["ragged"]
    kinds = [type(values).__name__ for values in (first["ragged"], second, third, empty, many)]
    values = [values.to_list() for values in (first["ragged"], second, third, empty, many)]
    return kinds, *values, first["sum"]


@pytest.mark.in_turn(4)
@pytest.mark.kills("predict_ragged_becomes_dense", "predictions_copied_as_one_array")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_ragged_outputs_stay_ragged(num_workers: int) -> None:
    expected = run_plain("tensorflow", ragged, False)
    assert expected[0] == ["RaggedTensor"] * 5 and expected[4] == [[]]
    assert expected[1] == [[1, 2], [3], [4, 5, 6], [7], [8, 9], [2], [1, 1, 1]]
    for actual in run("tensorflow", num_workers, ragged, True):
        np.testing.assert_allclose(actual[-1], expected[-1])
        assert actual[:-1] == expected[:-1]


def more_rows(under_strategy: bool) -> Any:
    """Predicts two rows per input row, in the order of the input."""
    import keras

    class Twice(keras.Model):
        def call(self, x: Any) -> Any:
            return keras.ops.repeat(x, 2, axis=0)

    class Mean(keras.Model):
        def call(self, x: Any) -> Any:
            return keras.ops.mean(x, axis=0, keepdims=True)

    with scope(under_strategy):
        twice, mean = Twice(), Mean()
    said = ""
    if under_strategy and keras.backend.backend() != "jax":
        with pytest.raises(ValueError, match="does not match its input") as info:
            mean.predict(ROWS, batch_size=4, verbose=0)
        said = str(info.value)
    many = twice.predict(np.arange(75.0).reshape(25, 3), batch_size=2, verbose=0)
    return twice.predict(ROWS, batch_size=4, verbose=0), said, many


@pytest.mark.kills(predictions_copied_twice="[1-jax]")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
def test_outputs_with_other_numbers_of_rows(backend: str, num_workers: int) -> None:
    for actual, _, many in run(backend, num_workers, more_rows, True):
        np.testing.assert_allclose(actual, np.repeat(ROWS, 2, axis=0))
        np.testing.assert_allclose(many, np.repeat(np.arange(75.0).reshape(25, 3), 2, axis=0))


def padded_to_the_longest(_: bool) -> str:
    """Predicts rows that are cut to the longest row of the replica. Returns the error."""
    import keras

    class Cut(keras.Model):
        def call(self, x: Any) -> Any:
            ops = keras.ops
            return x[:, : ops.max(ops.sum(ops.cast(x != 0, "int32"), axis=1))]

    with scope(True):
        model = Cut()
    with pytest.raises(RuntimeError, match="arrays of different shapes or dtypes") as info:
        model.predict(ROWS[1:5][::-1], batch_size=4, verbose=0)  # lengths 2, 1, 3, 1
    return str(info.value)


@pytest.mark.kills(predictions_of_different_lengths_joined="[torch]")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_outputs_of_different_lengths_are_an_error(backend: str) -> None:
    for said in run(backend, 2, padded_to_the_longest, True):
        assert re.search(r"worker 0=.*float32 \(.*2,?\).*worker 1=.*float32 \(.*3,?\)", said)


def draws(_: bool) -> Any:
    """Predicts one row, which all replicas have, with a layer that draws random numbers."""
    import keras

    class Noise(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, x: Any) -> Any:
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds)

    if keras.backend.backend() == "tensorflow":
        draws_lengths()
    with scope(True):
        model = keras.Sequential([keras.Input((3,)), Noise()])
    return model.predict(ROWS[:1], verbose=0)


def draws_lengths() -> None:
    """Predicts a row whose length depends on the replica."""
    import keras
    import tensorflow as tf

    import kdist

    class Length(keras.Model):
        def call(self, x: Any) -> Any:
            context = kdist.get_replica_context()
            replica = 0 if context is None else context.replica_id_in_sync_group
            return tf.RaggedTensor.from_tensor(tf.ones((1, 1 + replica), tf.complex64) * (2 + 3j))

    with scope(True):
        model = Length()
    assert model.predict(ROWS[:1], verbose=0).to_list() == [[2 + 3j]]


@pytest.mark.kills(
    predict_each_worker_its_own_draws="[tensorflow]", predict_lengths_of_each_worker="[tensorflow]"
)
@each_backend
def test_workers_return_the_same_where_a_layer_draws(backend: str) -> None:
    one, two = run(backend, 2, draws, True)
    np.testing.assert_array_equal(one, two)
    assert not np.allclose(one, ROWS[:1])
