"""Endless data and several steps per execution, of which the steps per epoch need not be a multiple."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import run, run_plain, scope


def in_worker_partial_executions(under_strategy: bool, steps_per_execution: int) -> list[Any]:
    """Trains, evaluates and predicts with 5 steps; returns all results."""
    import keras

    def batches() -> Iterator[Any]:
        random = np.random.RandomState(0)
        while True:
            yield random.rand(4, 3).astype("float32"), random.rand(4, 1).astype("float32")

    keras.utils.set_random_seed(1)
    with scope(under_strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps_per_execution)
    history = model.fit(batches(), epochs=3, steps_per_epoch=5, verbose=0)
    inputs = keras.Input((3,)), keras.Input((2,), optional=True)  # missing in all batches
    with scope(under_strategy):
        optional = keras.Model(inputs, keras.layers.Dense(1)(inputs[0]))
        optional.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    x, y = next(batches())
    optional_losses = optional.fit((x, None), y, batch_size=2, epochs=2, verbose=0).history["loss"]
    return [
        *(np.array(weight) for weight in model.get_weights()),
        *history.history.values(),
        int(model.optimizer.iterations),
        optional_losses,
        model.evaluate(batches(), steps=5, verbose=0),
        model.predict(batches(), steps=5, verbose=0),
    ]


@pytest.mark.kills(
    partial_executions_left_out="[jax-2]",
    first_execution_lost="[jax-3]",
    jax_missing_inputs_in_a_loop="[jax-2]",
)
@pytest.mark.parametrize("steps_per_execution", [2, 3])
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])  # Keras has no such executions on PyTorch
def test_executions_take_all_batches(backend: str, steps_per_execution: int) -> None:
    expected = run_plain(backend, in_worker_partial_executions, False, steps_per_execution)
    for num_workers in (1, 2):
        for found in run(backend, num_workers, in_worker_partial_executions, True, steps_per_execution):
            assert_close(found, expected)
