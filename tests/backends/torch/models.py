"""Models and runs for the tests in this directory, which compare kdist with plain Keras on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

import kdist

RTOL = 1e-5
ATOL = 1e-6


class Twice(keras.Model):
    """A model with a custom step and two optimizers; the second optimizer sees the changes of the first."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.second = keras.layers.Dense(2)
        # `compile` does not receive these optimizers: the first step builds them.
        self.optimizers = [keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1, momentum=0.9)]

    def call(self, x):
        return self.second(keras.ops.relu(self.first(x)))

    def train_step(self, data):
        x, y = data
        for layer, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            layer.zero_grad()
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
            self.zero_grad()
            loss.backward()
            weights = layer.trainable_weights
            optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss, "norm": keras.ops.norm(self.second.kernel.value.detach())}


class TorchInside(keras.Model):
    """A Keras model with PyTorch modules."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(5, 8)
        self.b = keras.layers.Dense(3)
        self.c = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.modes = []

    def call(self, x, training=False):
        if kdist.get_replica_context() is not None and kdist.has_strategy():
            self.modes.append((training, self.b.training, torch.is_grad_enabled()))
        return self.c(self.b(torch.relu(self.a(x))))


def mirrored(devices: int) -> kdist.MirroredStrategy:
    """Returns a strategy with the given number of CPU devices."""
    return kdist.MirroredStrategy([f"cpu:{i}" for i in range(devices)])


def data(rows: int = 35, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs with 5 columns and targets with 2 columns."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 5)).astype("float32")
    return x, (x[:, :2] * 2 + 1).astype("float32")


def train(
    strategy: Any, make: Callable[[bool], Any], x: Any, y: Any, **fit: Any
) -> tuple[Any, dict[str, Any]]:
    """Trains the model from `make(has_strategy)`; returns the model and its results."""
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make(strategy is not None)
    history = model.fit(x, y, **{"batch_size": 16, "epochs": 2, "verbose": 0} | fit).history
    numbers = {f"history {name}": np.array(values) for name, values in history.items()}
    numbers |= {f"weight {i}": np.array(w) for i, w in enumerate(model.get_weights())}
    numbers["predictions"] = model.predict(x, batch_size=16, verbose=0)
    return model, numbers


def assert_same_numbers(actual: dict[str, Any], expected: dict[str, Any], atol: float = ATOL) -> None:
    """Raises an error unless two runs gave the same results."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=RTOL, atol=atol, err_msg=name)
