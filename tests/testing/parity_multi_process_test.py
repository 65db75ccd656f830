"""`assert_parity` passes if the results match one device; otherwise its error describes the difference."""

from __future__ import annotations

import numpy as np
import pytest

from kdist.errors import InvalidArgumentError
from kdist.testing import WorkerFailure, Workers, assert_parity
from tests.helpers.processes import each_backend, start_pool

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(22, 4)).astype("float32")  # batches of 8, with a shorter last batch
Y = (X @ DRAW.normal(size=(4, 1)) + 0.3).astype("float32")


@pytest.fixture(scope="module")
def workers():
    with Workers(lambda num_workers, backend, env: start_pool(num_workers, backend)) as kept:
        yield kept


def make_model(*layers, optimizer="adam"):
    import keras

    inner = [keras.layers.Dense(6, "tanh"), *layers]
    model = keras.Sequential([keras.Input((4,)), *inner, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def with_dropout():
    import keras

    return make_model(keras.layers.Dropout(0.5, name="drops"))


def with_batch_statistics():
    import keras

    return make_model(keras.layers.BatchNormalization(name="normalizes"))


def drawing_by_itself():
    model = make_model()
    model.set_weights([np.random.default_rng().normal(size=w.shape) for w in model.get_weights()])
    return model


@pytest.mark.kills(parity_trains_both_on_one_device="[torch]")
@each_backend
def test_numbers_of_one_device(backend, workers):
    weights = np.linspace(0.5, 2, len(X)).astype("float32")
    told = {"batch_size": 8, "backend": backend, "workers": workers}
    assert_parity(make_model, (X, Y, weights), validation_data=(X[:5], Y[:5]), verbose=2, **told)
    with pytest.raises(AssertionError, match="The initial weights differ") as info:
        assert_parity(drawing_by_itself, (X, Y), epochs=1, **told)
    said = str(info.value)
    assert (
        f"MultiWorkerMirroredStrategy with 2 replicas on {backend}, worker 0, gives different results" in said
    )
    for number in ("before training, weight 0 (", "history, loss", "history, mae", "weight 0 ("):
        assert f"\n  {number}" in said


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (with_dropout, "Dropout 'drops' uses random numbers"),
        (with_batch_statistics, "BatchNormalization 'normalizes' computes .* Pass synchronized=True"),
    ],
)
def test_layers_that_are_suspected(layer, reason, workers):
    with pytest.raises(AssertionError, match=reason) as info:
        assert_parity(layer, (X, Y), epochs=1, batch_size=8, backend="torch", workers=workers)
    assert "\n  history, loss: " in str(info.value) and "before training" not in str(info.value)


def test_several_devices_and_data_from_a_function(workers):
    def data():
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def mirrored():
        import kdist

        return kdist.MirroredStrategy(["cpu:0", "cpu:1"])

    assert_parity(make_model, data, mirrored, num_workers=1, backend="jax", workers=workers)
    # A model that is already made under a strategy: there is no plain model to compare it with.
    with pytest.raises(WorkerFailure, match="(?s)in the scope of a strategy.*'MirroredStrategy'"):
        assert_parity(under_a_strategy, (X, Y), mirrored, num_workers=1, backend="jax", workers=workers)


def under_a_strategy():
    import kdist

    with kdist.MirroredStrategy(["cpu:0"]).scope():
        return make_model()


def test_what_cannot_be_compared(workers):
    with pytest.raises(InvalidArgumentError, match="only one replica"):
        assert_parity(make_model, (X, Y), num_workers=1, epochs=1, backend="torch", workers=workers)
    with pytest.raises(WorkerFailure, match="did not return a compiled Keras model"):
        assert_parity(lambda: "a model", (X, Y), backend="torch", workers=workers)
