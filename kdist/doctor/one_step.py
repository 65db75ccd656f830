"""The parity check of `kdist test`: one step of a small model on one device and on all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.doctor.report import FAIL, OK, Line
from kdist.parity import ATOL, RTOL, Training, explain, train

_ROWS = 23  # a prime, so the workers cannot share the rows evenly


def make_model() -> Any:
    """Returns a small model that covers all values that are summed over the replicas."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def rows() -> tuple[Any, Any, Any]:
    """Returns the training data. All rows and all sample weights are different."""
    import numpy as np

    draw = np.random.RandomState(0)
    x = draw.normal(size=(_ROWS, 8)).astype("float32")
    return x, draw.randint(4, size=_ROWS), np.linspace(0.5, 2, _ROWS).astype("float32")


def train_it(make_strategy: Callable[[], Any] | None) -> Training:
    """Trains the model under a strategy, or without one."""
    return train(make_model, rows, make_strategy, 1, 0, {"batch_size": _ROWS})


def compare(expected: Training | None, strategy: Any, exchange: Callable[[Any], list[Any]]) -> Line | None:
    """Trains the model on all workers. Workers with `expected` return the result of the comparison."""
    mine = train_it(lambda: strategy)
    everyone = exchange(mine.numbers)
    if expected is None:
        return None
    workers = [Training(mine.title, mine.num_replicas, numbers, ()) for numbers in everyone]
    message = explain(expected, workers, RTOL, ATOL)
    if message is not None:
        return Line(FAIL, "one step", message, "Report this as a bug, with the output of", "kdist info")
    return Line(OK, "one step", f"{mine.num_replicas} replicas match one device")
