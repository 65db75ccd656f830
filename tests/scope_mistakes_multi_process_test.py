"""A model with some parts that were created outside of the scope trains exactly as on one device."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend_in_twelve_turns, run, run_plain

# The parts that are created outside of the scope.
MISTAKES: list[tuple[str, ...]] = [
    ("layer",),
    ("state",),
    ("optimizer",),
    ("metric",),
    ("compile",),
    ("layer", "state", "optimizer", "metric"),
    ("layer", "state", "model"),
    ("layer", "state", "model", "optimizer", "metric"),
]


def trains(outside: tuple[str, ...], fits_inside: bool, under_strategy: bool) -> Any:
    import keras

    class Averaging(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            arguments = {"shape": shape[1:], "aggregation": "mean"}
            self.mean = self.add_weight(initializer="zeros", trainable=False, **arguments)
            self.scale = self.add_weight(initializer="ones", **arguments)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x * self.scale

    def scope(is_inside: bool) -> Any:
        if not (under_strategy and is_inside):
            return contextlib.nullcontext()
        from tests.helpers.processes import strategy

        return strategy().scope()

    random = np.random.RandomState(0)
    x, y = random.randn(23, 3).astype("float32"), random.randn(23, 1).astype("float32")
    keras.utils.set_random_seed(1)
    with scope("layer" not in outside):
        layer = keras.layers.Dense(4, activation="tanh")
        layer.build((None, 3))
    with scope("state" not in outside):
        state = Averaging()
        state.build((None, 4))
    with scope("optimizer" not in outside):
        optimizer = keras.optimizers.Adam(0.05)
    with scope("metric" not in outside):
        metric = keras.metrics.MeanAbsoluteError(name="error")
    with scope("model" not in outside):
        model = keras.Sequential([keras.Input((3,)), layer, state, keras.layers.Dense(1)])
    with warnings.catch_warnings(record=True) as caught, scope("compile" not in outside):
        warnings.simplefilter("always")
        model.compile(optimizer, "mse", metrics=[metric])
    with scope(fits_inside):
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        values = model.evaluate(x, y, batch_size=5, verbose=0)
    said = [
        str(warning.message)
        for warning in caught
        if "outside the scope of the strategy" in str(warning.message)
    ]
    numbers = [*history.values(), values, *model.get_weights(), *[v.numpy() for v in optimizer.variables]]
    return said, numbers


def all_mistakes(fits_inside: bool) -> Any:
    return [trains(outside, fits_inside, True) for outside in MISTAKES]


@pytest.mark.kills(model_from_outside_without_a_word="[1-torch]")
@each_backend_in_twelve_turns
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_was_created_outside_of_the_scope_trains_as_on_one_device(
    backend: str, num_workers: int
) -> None:
    _, expected = run_plain(backend, trains, (), False, False)
    for found in run(backend, num_workers, all_mistakes, num_workers == 2):
        for outside, (said, numbers) in zip(MISTAKES, found, strict=True):
            assert len(said) == ("model" in outside), (outside, said)
            assert_close(numbers, expected, rtol=1e-4, atol=1e-5, where=str(outside))


def in_worker_without_a_scope() -> list[str]:
    """Trains a model that was created without the scope, with a synchronized layer; returns the warnings."""
    import keras

    from tests.helpers.processes import strategy

    strategy()
    layer = keras.layers.BatchNormalization(synchronized=True)  # plain Keras on PyTorch refuses this
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1, name="last")], name="alone")
    model.compile("sgd", "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.evaluate(x, y, verbose=0)  # makes no difference between the workers
        model.fit(x, y, verbose=0)
    return [text for warning in caught if "outside the scope" in (text := str(warning.message))]


@pytest.mark.kills("fit_of_a_model_from_outside_without_a_word", "synchronized_layers_only_in_a_scope")
@pytest.mark.xdist_group("pool-torch")
def test_workers_that_train_a_model_each_are_warned() -> None:
    for said in run("torch", 2, in_worker_without_a_scope):
        assert len(said) == 1 and "Model alone was created outside the scope of the strategy" in said[0], said
        assert "each worker trains its own model" in said[0]
