"""Makes small models, and reads their variables, for functions that run in workers."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np


def network(
    *layers: Any,
    inputs: int = 3,
    optimizer: Any = "sgd",
    rate: float | None = None,
    loss: Any = "mse",
    seed: int | None = None,
    scope: Any = None,
    **compiled: Any,
) -> Any:
    """Returns a compiled model of dense layers.

    Args:
        *layers: Layers. A number is a dense layer with so many units, and `tanh` unless it is the last layer.
        inputs: The number of columns of the data.
        optimizer: A name, or an optimizer.
        rate: The learning rate of a named optimizer, if not the default.
        loss: As for `compile`.
        seed: Keras's seed, set before the model is made.
        scope: The context to make the model in, for example `strategy().scope()`.
        **compiled: More arguments of `compile`.
    """
    import keras

    if seed is not None:
        keras.utils.set_random_seed(seed)
    with scope or contextlib.nullcontext():
        made = [
            keras.layers.Dense(layer, None if index == len(layers) - 1 else "tanh")
            if isinstance(layer, int)
            else layer
            for index, layer in enumerate(layers)
        ]
        model = keras.Sequential([keras.Input((inputs,)), *made])
        if rate is not None:
            optimizer = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": rate}})
        model.compile(optimizer, loss, **compiled)
    return model


def weights_of(model: Any) -> list[np.ndarray]:
    """Returns copies of the weights, as arrays."""
    return _arrays(model.weights)


def state_of(model: Any) -> list[np.ndarray]:
    """Returns copies of all variables as arrays: the weights, the seeds, and the optimizer's variables."""
    return _arrays([*model.variables, *model.optimizer.variables])


def _arrays(variables: list[Any]) -> list[np.ndarray]:
    import keras

    # On PyTorch, an array shares its memory with the variable.
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def add_loss_to(layer: Any, loss: Any) -> None:
    """Adds a loss as a function that a layer calls would do."""
    layer.add_loss(loss)
