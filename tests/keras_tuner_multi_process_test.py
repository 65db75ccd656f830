"""KerasTuner's `distribution_strategy=` with a strategy of kdist: trials have the same scores as on one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.processes import each_backend_in_twelve_turns
from tests.helpers.scripts import Script

SEARCH = """
import json
import sys

import keras
import keras_tuner
import numpy as np

import kdist

x = np.random.RandomState(0).randn(96, 8).astype("float32")
y = x.sum(1, keepdims=True)
replicas = []


def build(hp):
    replicas.append(kdist.get_strategy().num_replicas_in_sync)
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(hp.Choice("units", [2, 8]), activation="tanh")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(hp.Choice("rate", [0.01, 0.1])), "mse")
    return model


def search(name, strategy):
    tuner = keras_tuner.GridSearch(
        build, objective="val_loss", distribution_strategy=strategy, directory=name, project_name="search"
    )
    tuner.search(
        x[:64], y[:64], validation_data=(x[64:], y[64:]), batch_size=18, epochs=2, shuffle=False, verbose=0
    )
    trials = tuner.oracle.get_best_trials(4)
    best = tuner.get_best_models(1)[0].predict(x, verbose=0)
    return [(trial.hyperparameters.values, float(trial.score)) for trial in trials], best.ravel().tolist()


mirrored = search("mirrored", kdist.MirroredStrategy(["cpu:0", "cpu:1"]))
assert replicas[-4:] == [2] * 4, replicas
print("FOUND", json.dumps([mirrored, search("plain", None)]))
"""


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("keras_tuner") is None, reason="keras-tuner is not installed")
@each_backend_in_twelve_turns
def test_a_search_under_a_strategy_finds_the_same_model(backend: str, tmp_path: Path) -> None:
    script = Script(tmp_path, "search", SEARCH, {"KERAS_BACKEND": backend}).finish()
    (trials, predicted), (expected, by_one_device) = script.told("FOUND ")
    assert [values for values, _ in trials] == [values for values, _ in expected]
    assert [score for _, score in trials] == pytest.approx([score for _, score in expected], rel=1e-5)
    np.testing.assert_allclose(predicted, by_one_device, rtol=1e-4, atol=1e-5)
