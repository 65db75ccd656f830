"""Trains a linear model by hand: an independent check of results that needs no framework.

Scripts in separate processes train the same model; the tests themselves only compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, BATCH = 20, 8  # 3 steps per epoch, the last step with 4 rows
STEPS = 3
RATE, MOMENTUM = 0.01, 0.9


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns the training data: all rows differ, and the model fits none of them exactly."""
    random = np.random.RandomState(11)
    x = random.randn(ROWS, 3).astype("float32")
    return x, (x @ [[1.5], [-2.0], [0.5]] + random.randn(ROWS, 1)).astype("float32")


def start() -> list[np.ndarray]:
    """Returns the weights before the first step: kernel and bias."""
    return [np.array([[0.3], [-0.7], [1.1]], "float32"), np.array([0.25], "float32")]


def weights(epochs: int) -> list[float]:
    """Returns the weights after some epochs in the order of the rows: gradient descent with momentum."""
    return _trained(epochs)[0]


def losses(epochs: int) -> list[float]:
    """Returns the losses that `fit` reports for some epochs."""
    return _trained(epochs)[1]


def _trained(epochs: int) -> tuple[list[float], list[float]]:
    x, y = (part.astype("float64") for part in rows())
    kernel, bias = (part.astype("float64") for part in start())
    velocities = [0.0 * kernel, 0.0 * bias]
    errors: list[float] = []
    for _ in range(epochs):
        errors.append(0.0)
        for first in range(0, ROWS, BATCH):
            batch, labels = x[first : first + BATCH], y[first : first + BATCH]
            error = 2 * (batch @ kernel + bias - labels) / len(batch)
            errors[-1] += float(np.sum((error * len(batch) / 2) ** 2)) / ROWS
            for index, gradient in enumerate((batch.T @ error, error.sum(0))):
                velocities[index] = MOMENTUM * velocities[index] - RATE * gradient
            kernel, bias = kernel + velocities[0], bias + velocities[1]
    return [*kernel[:, 0].tolist(), *bias.tolist()], errors


def model(is_true: bool = True) -> Any:
    """Returns the compiled model. Call it in a strategy's scope.

    Args:
        is_true: Whether the model starts with the weights of `start`; otherwise it starts far away from them.
    """
    import keras

    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")
    made.set_weights([part if is_true else part * 0 + 50 for part in start()])
    return made


def fit(made: Any, epochs: int, *callbacks: Any) -> None:
    """Trains the model on all rows, in their order."""
    x, y = rows()
    made.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def show(made: Any) -> str:
    """Returns the weights as a line for `shown`."""
    values = [value for part in made.get_weights() for value in np.ravel(part).tolist()]
    return "WEIGHTS " + " ".join(map(repr, values))


def shown(output: str) -> list[list[float]]:
    """Returns the weights from each line of `show` in an output."""
    lines = [line.partition("WEIGHTS ")[2] for line in output.splitlines() if "WEIGHTS " in line]
    return [[float(word) for word in line.split()] for line in lines]
