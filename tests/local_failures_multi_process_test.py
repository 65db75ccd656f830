"""A worker raises its own errors unchanged: they are not reported as lost workers, whatever their messages contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run

X = np.random.RandomState(0).randn(12, 3).astype("float32")


def fails(kind: str) -> tuple[str, str]:
    """Fits a model with a part that fails on every worker; returns the error."""
    import keras

    from tests.helpers.processes import strategy

    with strategy().scope():
        layer, arguments, compiled, data = KINDS[kind]()
        model = keras.Sequential([keras.Input((3,)), *layer, keras.layers.Dense(1)])
        model.compile("sgd", **{"loss": "mse", **compiled})
    try:
        model.fit(**{"x": X, "y": X[:, :1], "batch_size": 4, "verbose": 0, **data, **arguments})
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def engines_error(text: str) -> Exception:
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.errors.InternalError(None, None, text)
    if backend == "jax":
        import jax

        return jax.errors.JaxRuntimeError(f"INTERNAL: {text}")
    import torch

    return torch.AcceleratorError(text) if hasattr(torch, "AcceleratorError") else RuntimeError(text)


def raising(error: Callable[[], Exception]) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise error()

    return function


def in_layer(error: Callable[[], Exception]) -> Any:
    import keras

    class Failing(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                raise error()
            return x

    return [Failing()], {}, {}, {}


def in_callback(error: Callable[[], Exception]) -> Any:
    import keras

    return [], {"callbacks": [keras.callbacks.LambdaCallback(on_train_batch_end=raising(error))]}, {}, {}


def in_pipeline(error: Callable[[], Exception]) -> Any:
    def generator() -> Iterator[Any]:
        yield X[:4], X[:4, :1]
        yield X[:4], X[:4, :1]
        raise error()

    return [], {}, {}, {"x": generator(), "y": None, "batch_size": None}


def out_of_memory() -> Any:
    import keras

    class Huge(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            everywhere = keras.ops.broadcast_to(x[:1], (2**30, 2**18, 3))
            return x + keras.ops.sum(keras.ops.sort(everywhere))

    return [Huge()], {}, {}, {}


KINDS: dict[str, Callable[[], Any]] = {
    "error in a layer": lambda: in_layer(lambda: ValueError("rows cannot be folded")),
    "connection in a layer": lambda: in_layer(
        lambda: RuntimeError("connection refused by the feature store")
    ),
    "error in a loss": lambda: ([], {}, {"loss": raising(lambda: TypeError("no such loss"))}, {}),
    "error in a metric": lambda: ([], {}, {"metrics": [raising(lambda: KeyError("gloo"))]}, {}),
    "shapes": lambda: ([], {}, {}, {"y": np.zeros((11, 1), "float32")}),
    "error in a callback": lambda: in_callback(lambda: ValueError("heartbeat of the dashboard missing")),
    "connection in a callback": lambda: in_callback(lambda: ConnectionResetError("connection reset by peer")),
    "engine's error in a callback": lambda: in_callback(
        lambda: engines_error("device 0 has fallen off the bus")
    ),
    "engine's words in a callback": lambda: in_callback(
        lambda: engines_error("UNAVAILABLE: upload to /job:worker/task:7 failed")
    ),
    "error in the pipeline": lambda: in_pipeline(lambda: OSError("connection closed by the disk")),
    "engine's error in the pipeline": lambda: in_pipeline(
        lambda: engines_error("Aborted: file is truncated")
    ),
    "out of memory": out_of_memory,
}


OF_ENGINES = ("InternalError", "JaxRuntimeError", "AcceleratorError")
# A pipeline's errors become a `DatasetError` on all workers, with the original message.
EXPECTED = {
    "error in a layer": ("ValueError",),
    "connection in a layer": ("RuntimeError",),
    "error in a loss": ("TypeError",),
    "error in a metric": ("KeyError",),
    "shapes": ("ValueError",),
    "error in a callback": ("ValueError",),
    "connection in a callback": ("ConnectionResetError",),
    "engine's error in a callback": OF_ENGINES,
    "engine's words in a callback": OF_ENGINES,
    "error in the pipeline": ("DatasetError",),
    "engine's error in the pipeline": ("DatasetError",),
    "out of memory": ("ResourceExhaustedError", "JaxRuntimeError", "RuntimeError", "XlaRuntimeError"),
}


@pytest.mark.kills(
    jax_own_errors_are_lost_workers=("[connection in a layer-jax]", "[connection in a callback-jax]"),
    tensorflow_own_errors_are_lost_workers="callback-tensorflow",
)
@each_backend
@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_its_name(backend: str, kind: str) -> None:
    for error, text in run(backend, 2, fails, kind):
        assert error in EXPECTED[kind] and "lost" not in text, text
