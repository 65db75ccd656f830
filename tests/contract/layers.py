"""Layers with custom state or structure."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import kdist
from tests.contract import arrays as a
from tests.contract.case import Numbers, case


@case("synchronized `BatchNormalization`")
def synchronized_batch_normalization() -> Numbers:
    x, y = a.regression()
    # Without kdist, Keras supports the argument only on TensorFlow. On one device it changes nothing.
    synchronized = kdist.has_strategy() or keras.backend.backend() == "tensorflow"
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(momentum=0.7, synchronized=synchronized),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = a.fit(model, x, y, validation_data=(x, y))
    return a.numbers(model, history, predicted=a.predict(model, x))


@case("convolution, pooling")
def convolution() -> Numbers:
    images = np.random.RandomState(8).rand(a.ROWS, 8, 8, 1).astype("float32")
    labels = (images.mean(axis=(1, 2, 3)) * 40).astype("int32") % 3
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return a.numbers(model, a.fit(model, images, labels))


@case("embeddings and recurrent layers")
def recurrent() -> Numbers:
    x = a.tokens()
    y = (x.sum(axis=1, keepdims=True) * 0.1).astype("float32")
    model = keras.Sequential(
        [
            keras.layers.Input((7,), dtype="int32"),
            keras.layers.Embedding(11, 5, mask_zero=True),
            keras.layers.LSTM(4),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return a.numbers(model, a.fit(model, x, y))


@case(
    "stateful recurrent layers",
    backends=("jax",),
    why_not_all="the states have one row per row of the global batch, but a replica sees only its rows",
)
def stateful_recurrent() -> Numbers:
    x = a.features(2 * a.BATCH, 9).reshape(-1, 3, 3)
    y = x.sum(axis=(1, 2))[:, None] * 0.1
    model = keras.Sequential(
        [
            keras.layers.Input(batch_shape=(a.BATCH, 3, 3)),
            keras.layers.SimpleRNN(4, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = a.fit(model, x, y)
    (states,) = model.layers[0].states
    return a.numbers(model, history, states=keras.ops.convert_to_numpy(states))


@case("attention with masks (`MultiHeadAttention`)")
def attention() -> Numbers:
    x = a.tokens()
    inputs = keras.Input((7,), dtype="int32")
    embedded = keras.layers.Embedding(11, 6, mask_zero=True)(inputs)
    attended = keras.layers.MultiHeadAttention(2, 3)(embedded, embedded, use_causal_mask=True)
    hidden = keras.layers.LayerNormalization()(keras.layers.Add()([embedded, attended]))
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(pooled)])
    model.compile(keras.optimizers.SGD(0.02), ["mse", "mae"])
    y = ((x[..., None] * 0.1).astype("float32"), (x.mean(axis=1, keepdims=True) * 0.2).astype("float32"))
    return a.numbers(model, a.fit(model, x, y))


class Counting(keras.layers.Layer):
    """Counts steps and keeps a moving mean in variables without an explicit aggregation."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, axis=0))
        return inputs


@case("custom layers with variables")
def stateful_layer() -> Numbers:
    model = keras.Sequential([keras.layers.Input((6,)), Counting(), keras.layers.Dense(1)])
    return a.train(keras.optimizers.SGD(0.1), model)


@case("frozen layers")
def frozen_layers() -> Numbers:
    model = a.mlp()
    model.layers[0].trainable = False
    return a.train(keras.optimizers.Adam(0.01), model)


@case("`keras.RematScope`")
def remat() -> Numbers:
    # Keras's "full" mode fails on TensorFlow: `tf.recompute_grad` refuses keyword arguments in a graph.
    with keras.RematScope("activations" if keras.backend.backend() == "tensorflow" else "full"):
        model = a.mlp()
        model = keras.Sequential([model.layers[0], keras.layers.LayerNormalization(), model.layers[1]])
        return a.train(keras.optimizers.Adam(0.01), model)


@case(
    "`keras.RematScope` with synchronized `BatchNormalization`",
    backends=("torch",),
    why_not_all="on JAX and TensorFlow, Keras cannot rematerialize layers that update variables",
)
def remat_of_states() -> Numbers:
    with keras.RematScope("full"):
        normalization = keras.layers.BatchNormalization(momentum=0.7, synchronized=kdist.has_strategy())
        layers = [normalization, keras.layers.Dropout(0.0), Counting(), keras.layers.Dense(1)]
        return a.train(keras.optimizers.SGD(0.1), keras.Sequential([keras.layers.Dense(8), *layers]))
