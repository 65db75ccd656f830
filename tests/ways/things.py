"""Defines the objects for the ways, the table of the ways, and their results. It does not depend on kdist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Things:
    """The objects to try: variables, metrics, a built model with its optimizer, and other optimizers.

    Args:
        folder: A directory that a way may write to; the same on all workers.
    """

    def __init__(self, folder: str) -> None:
        import keras
        import numpy as np

        self.folder = folder
        self.number = keras.Variable(2.5, name="number")
        self.integer = keras.Variable(3, dtype="int32", trainable=False, name="integer")
        self.matrix = keras.Variable(np.array([[1.0, -2.0], [3.0, 0.5]], "float32"), name="matrix")
        self.flags = keras.Variable(np.array([True, False]), dtype="bool", trainable=False, name="flags")
        self.mean = keras.metrics.Mean(name="mean")
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")
        self.seeds = keras.random.SeedGenerator(7)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", name="dense")
        self.model = keras.Sequential([keras.Input((2,)), self.dense], name="model")
        self.model.compile(keras.optimizers.Adam(0.5), "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.other = keras.optimizers.SGD(0.25, momentum=0.5)
        self.scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=4.0)
        self.scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))
        self.averaging = keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.5)
        self.x = np.array([[1.0, 2.0], [3.0, -4.0]], "float32")
        self.gradients = [np.array([[2.0], [4.0]], "float32"), np.array([8.0], "float32")]

    def weights(self) -> Any:
        return self.model.get_weights()


Way = Callable[[Things], Any]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def ways(**functions: Way) -> None:
    WAYS.update(functions)


def ops() -> Any:
    import keras

    return keras.ops


def np() -> Any:
    import numpy as np

    return np


def seen(result: Any) -> Any:
    """Converts a result to plain Python and NumPy, to send and to compare it."""
    import keras
    import numpy as np

    if isinstance(result, dict):
        return {name: seen(part) for name, part in result.items()}
    if isinstance(result, (list, tuple)):
        return [seen(part) for part in result]
    if result is None or isinstance(result, (str, bool, int, float)):
        return result
    if isinstance(result, keras.Variable) or keras.ops.is_tensor(result):
        result = keras.ops.convert_to_numpy(result)
    array = np.asarray(result)
    assert array.dtype != object, result
    return str(array.dtype), array.tolist()


def try_way(name: str, things: Things) -> Any:
    """Returns the result of a way, or its error."""
    try:
        return seen(WAYS[name](things))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
