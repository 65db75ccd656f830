"""Random training programs, for which the contract promises the same numbers as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from tests.contract import Numbers, make_strategy

if TYPE_CHECKING:
    import keras

Layers = Literal["dense", "convolution", "normalization", "recurrent", "embedding"]
Weights = Literal["none", "random", "mostly zero", "per class"]
Dtype = Literal["float32", "float64", "mixed_bfloat16"]
_CLASSES = 3
_WORDS = 9
_LENGTH = 6
# Relative to the largest number of an array. bfloat16 has 8 significant bits.
TOLERANCE = {"float32": 2e-4, "float64": 1e-9, "mixed_bfloat16": 0.06}


@dataclass(frozen=True)
class Draw:
    """A training program.

    Args:
        layers: The kind of model.
        loss: The name of a loss.
        optimizer: The name of an optimizer.
        clipping: The optimizer's argument that clips gradients, or an empty string.
        accumulation: The number of batches per update, or 1.
        rows: The number of rows.
        batch_size: The rows per batch; it can exceed the number of rows.
        validation_rows: The number of rows for validation, or 0.
        weights: The weights of the rows.
        dtype: The policy for data types.
        epochs: The number of epochs.
        steps_per_execution: The number of batches per call of the compiled step.
        regularizer: The factor of an L2 regularizer, or 0.
        seed: The seed of the data and the initial weights.
    """

    layers: Layers = "dense"
    loss: str = "mse"
    optimizer: str = "sgd"
    clipping: str = ""
    accumulation: int = 1
    rows: int = 11
    batch_size: int = 4
    validation_rows: int = 0
    weights: Weights = "none"
    dtype: Dtype = "float32"
    epochs: int = 1
    steps_per_execution: int = 1
    regularizer: float = 0.0
    seed: int = 0


def train(draw: Draw, configuration: str | None = None) -> Numbers | None:
    """Trains a drawn program.

    Args:
        draw: The program.
        configuration: The name of the strategy's configuration; `None` for plain Keras on one device.

    Returns:
        Weights, history, scores and predictions; `None` in a process that works for another process.
    """
    import keras

    strategy = None if configuration is None else make_strategy(configuration)
    if configuration is not None and strategy is None:
        return None
    keras.utils.clear_session()
    keras.utils.set_random_seed(draw.seed)
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    try:
        keras.config.set_floatx("float64" if draw.dtype == "float64" else "float32")
        keras.config.set_dtype_policy(draw.dtype)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            # Plain Keras on PyTorch has no `steps_per_execution`, which does not change the numbers.
            return _numbers(replace(draw, steps_per_execution=1) if strategy is None else draw)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def _numbers(draw: Draw) -> Numbers:
    model = _model(draw)
    x, y = _data(draw, draw.rows, draw.seed)
    arguments: dict[str, object] = {}
    if draw.validation_rows:
        arguments["validation_data"] = _data(draw, draw.validation_rows, draw.seed + 1)
    if draw.weights == "per class":
        arguments["class_weight"] = {0: 0.5, 1: 2.0, 2: 0.0}
    elif draw.weights != "none":
        arguments["sample_weight"] = _row_weights(draw)
    history = model.fit(
        x, y, batch_size=draw.batch_size, epochs=draw.epochs, shuffle=False, verbose=0, **arguments
    )
    found: Numbers = {f"history {name}": np.array(values) for name, values in history.history.items()}
    found |= {f"weight {i} {w.name}": value for i, (w, value) in enumerate(_values(model))}
    found["scores"] = np.array(model.evaluate(x, y, batch_size=draw.batch_size, verbose=0))
    found["predictions"] = model.predict(x, batch_size=draw.batch_size, verbose=0)
    return found


def _values(model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
    return list(zip(model.weights, model.get_weights(), strict=True))


def _data(draw: Draw, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    floats = "float64" if draw.dtype == "float64" else "float32"
    if draw.layers == "embedding":
        x = random.randint(0, _WORDS, (rows, _LENGTH)).astype("int32")
    else:
        x = random.randn(rows, _LENGTH).astype(floats)
    if "categorical" in draw.loss:
        return x, random.randint(0, _CLASSES, (rows,)).astype("int32")
    return x, random.randn(rows, _CLASSES).astype(floats)


def _row_weights(draw: Draw) -> np.ndarray:
    random = np.random.RandomState(draw.seed + 2)
    weights = random.uniform(0.5, 2.0, draw.rows)
    if draw.weights == "mostly zero":
        weights[random.permutation(draw.rows)[: draw.rows - draw.rows // 4 - 1]] = 0.0
    return weights.astype("float64" if draw.dtype == "float64" else "float32")


def _model(draw: Draw) -> keras.Model:
    import keras

    import kdist

    # Without kdist, Keras accepts `synchronized` only on TensorFlow. It changes nothing on one device.
    synchronized = kdist.has_strategy() or keras.backend.backend() == "tensorflow"
    layers = keras.layers
    hidden: dict[Layers, Callable[[], list[keras.Layer]]] = {
        "dense": lambda: [layers.Dense(7, "tanh", kernel_regularizer=_regularizer(draw))],
        "convolution": lambda: [
            layers.Reshape((_LENGTH, 1)),
            layers.Conv1D(3, 2, activation="tanh", kernel_regularizer=_regularizer(draw)),
            layers.Flatten(),
        ],
        # A bias before the normalization has no effect: its gradient would be noise, which Adam enlarges.
        "normalization": lambda: [
            layers.Dense(5, use_bias=False, kernel_regularizer=_regularizer(draw)),
            layers.BatchNormalization(synchronized=synchronized),
        ],
        "recurrent": lambda: [
            layers.Reshape((_LENGTH // 2, 2)),
            layers.GRU(4, kernel_regularizer=_regularizer(draw)),
        ],
        "embedding": lambda: [
            layers.Embedding(_WORDS, 4, mask_zero=True, embeddings_regularizer=_regularizer(draw)),
            layers.GlobalAveragePooling1D(),
        ],
    }
    # The input of an embedding contains whole numbers.
    inputs = keras.Input((_LENGTH,), dtype="int32" if draw.layers == "embedding" else None)
    model = keras.Sequential([inputs, *hidden[draw.layers](), layers.Dense(_CLASSES, dtype=_outputs(draw))])
    loss = draw.loss
    if "categorical" in loss:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        _optimizer(draw),
        loss,
        metrics=["accuracy"] if "categorical" in draw.loss else ["mse"],
        steps_per_execution=draw.steps_per_execution,
    )
    return model


def _outputs(draw: Draw) -> str:
    return "float64" if draw.dtype == "float64" else "float32"


def _regularizer(draw: Draw) -> keras.Regularizer | None:
    import keras

    return keras.regularizers.L2(draw.regularizer) if draw.regularizer else None


def _optimizer(draw: Draw) -> keras.Optimizer:
    import keras

    options: dict[str, float] = {draw.clipping: 0.2} if draw.clipping else {}
    if draw.accumulation > 1:
        options["gradient_accumulation_steps"] = draw.accumulation
    of_name = {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.8, **options),
        # A large epsilon: a gradient near zero must not become a step of full size.
        "adam": lambda: keras.optimizers.Adam(0.05, epsilon=0.01, **options),
        "adamw": lambda: keras.optimizers.AdamW(0.05, epsilon=0.01, weight_decay=0.1, **options),
        "rmsprop": lambda: keras.optimizers.RMSprop(0.02, epsilon=0.01, **options),
        "adagrad": lambda: keras.optimizers.Adagrad(0.1, **options),
    }
    return of_name[draw.optimizer]()
