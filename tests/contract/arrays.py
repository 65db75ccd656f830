"""Makes small data for the cases. Neither 2, 3 nor 4 replicas can split every batch evenly."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

ROWS = 37  # 3 replicas cannot split batches of 16 evenly; 2 and 4 cannot split the last batch of 5
BATCH = 16


def features(rows: int = ROWS, columns: int = 6, seed: int = 0) -> np.ndarray:
    """Returns normally distributed rows, float32."""
    return np.random.RandomState(seed).randn(rows, columns).astype("float32")


def regression(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and an almost linear target of shape (rows, 1)."""
    x = features(rows)
    noise = np.random.RandomState(1).randn(rows, 1)
    return x, (x[:, :1] * 2 - x[:, 1:2] + 0.5 + 0.1 * noise).astype("float32")


def classes(rows: int = ROWS, number: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and their classes, int32 of shape (rows,)."""
    x = features(rows)
    scores = x @ np.random.RandomState(2).randn(x.shape[1], number)
    return x, scores.argmax(axis=1).astype("int32")


def weights(rows: int = ROWS) -> np.ndarray:
    """Returns one weight per row, some of them zero."""
    w = np.random.RandomState(3).rand(rows).astype("float32") * 2
    w[::7] = 0
    return w


def tokens(rows: int = ROWS, length: int = 7, words: int = 11) -> np.ndarray:
    """Returns sequences of word numbers, int32. Each row ends in zeros, from a different position."""
    random = np.random.RandomState(4)
    ids = random.randint(1, words, size=(rows, length)).astype("int32")
    ends = random.randint(1, length + 1, size=rows)
    ids[np.arange(length)[None, :] >= ends[:, None]] = 0
    return ids


def mlp(outputs: int = 1, activation: str | None = None, **dense: Any) -> keras.Model:
    """Returns a small dense network for `features`."""
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh", **dense),
            keras.layers.Dense(outputs, activation=activation, **dense),
        ]
    )


def numbers(model: keras.Model, history: Any = None, **more: Any) -> dict[str, Any]:
    """Returns the weights of a model, the history of a fit, and any additional results to compare."""
    found = {f"weight {i} {w.path}": keras.ops.convert_to_numpy(w) for i, w in enumerate(model.weights)}
    found = {name.split("/")[0] + " " + name.rpartition("/")[2]: value for name, value in found.items()}
    if history is not None:
        found |= {f"history {name}": values for name, values in history.history.items()}
    return found | more


def fit(model: keras.Model, x: Any, y: Any = None, **arguments: Any) -> Any:
    """Trains two epochs in the given order, in batches that the replicas cannot split evenly."""
    return model.fit(x, y, **{"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | arguments)


def predict(model: keras.Model, x: Any) -> Any:
    """Returns the predictions of a model, in batches that the replicas cannot split evenly."""
    return model.predict(x, batch_size=BATCH, verbose=0)


def evaluate(model: keras.Model, x: Any, y: Any, **arguments: Any) -> Any:
    """Returns the scores of a model, in batches that the replicas cannot split evenly."""
    return model.evaluate(x, y, batch_size=BATCH, verbose=0, **arguments)


def train(
    optimizer: Any, model: keras.Model | None = None, loss: Any = "mse", **arguments: Any
) -> dict[str, Any]:
    """Trains a network, by default `mlp`, on `regression`; returns its numbers."""
    model = model or mlp()
    model.compile(optimizer, loss)
    return numbers(model, fit(model, *regression(), **arguments))
