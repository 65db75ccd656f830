"""`keras.models.load_model` loads a file that a strategy wrote: with and without a scope, and on other backends."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.data import make_data
from tests.helpers.models import state_of
from tests.helpers.processes import each_backend_in_twelve_turns, run, strategy
from tests.saving_multi_process_test import make_model


def in_worker_save_for_others(path):
    model = make_model(scope=strategy().scope())
    model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
    model.save(path)
    saved = state_of(model)
    model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
    return saved, state_of(model)


def in_worker_load(path, scoped):
    """Loads a model in scopes with 2 and 3 replicas, or outside of a scope, and continues the training."""
    import contextlib

    import keras

    results = []
    for replicas in (2, 3) if scoped else (2,):
        with strategy(replicas).scope() if scoped else contextlib.nullcontext():
            model = keras.models.load_model(path)
        loaded = state_of(model)
        model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
        results.append((loaded, state_of(model)))
    return results


@pytest.mark.kills(file_without_optimizer="[torch]")
@each_backend_in_twelve_turns
def test_a_file_is_loaded_anywhere_and_trains_on(backend, tmp_path):
    path = str(tmp_path / "model.keras")
    saved, continued = run(backend, 2, in_worker_save_for_others, path)[0]
    others = {"tensorflow": "torch", "jax": "tensorflow"}
    for where, workers, scoped in (
        (backend, 1, True),
        (backend, 1, False),
        (backend, 2, True),
        *([(others[backend], 1, True)] if backend in others else []),
    ):
        for results in run(where, workers, in_worker_load, path, scoped):
            for loaded, trained in results:
                assert_equal(saved, loaded)
                assert_close(trained, continued, rtol=1e-4, atol=1e-5)


def in_worker_save_trained(path):
    model = make_model(scope=strategy().scope())
    model.fit(*make_data(), batch_size=6, epochs=1, shuffle=False, verbose=0)
    model.save(path)
    return model.predict(make_data()[0], verbose=0)


def in_worker_load_and_compile(path):
    import keras

    with strategy().scope():
        model = keras.models.load_model(path, compile=False)
        model.compile("sgd", "mse")
    predicted = model.predict(make_data()[0], verbose=0)
    history = model.fit(*make_data(), epochs=2, verbose=0).history
    return predicted, history["loss"]


@pytest.mark.parametrize("where", ["tensorflow", "jax"])
def test_a_file_of_pytorch_is_compiled_anew_elsewhere(where, tmp_path):
    # Keras writes PyTorch's optimizer class to the file, and this class can update only tensors of PyTorch.
    path = str(tmp_path / "model.keras")
    expected = run("torch", 2, in_worker_save_trained, path)[0]
    ((predicted, losses),) = run(where, 1, in_worker_load_and_compile, path)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    assert losses[1] < losses[0]
