"""Reductions, masks, custom losses and regularizers: the denominators of the global batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


def _train(model: keras.Model, loss: Any, weighted: bool = True, rate: float = 0.05) -> Numbers:
    x, y = a.regression()
    model.compile(keras.optimizers.SGD(rate), loss)
    weights = a.weights() if weighted else None
    history = a.fit(model, x, y, sample_weight=weights)
    return a.numbers(model, history, score=a.evaluate(model, x, y, sample_weight=weights))


@case("reduction `sum`")
def reduction_sum() -> Numbers:
    return _train(a.mlp(), keras.losses.MeanSquaredError(reduction="sum"), rate=0.005)


@case("reduction `sum_over_batch_size`")
def reduction_sum_over_batch_size() -> Numbers:
    return _train(a.mlp(), keras.losses.Huber(reduction="sum_over_batch_size"))


@case("reduction `mean_with_sample_weight`")
def reduction_mean_with_sample_weight() -> Numbers:
    return _train(a.mlp(), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))


@case(
    "loss reduction `none`",
    backends=("tensorflow",),
    why_not_all="JAX and PyTorch only differentiate scalars",
)
def reduction_none() -> Numbers:
    return a.train(keras.optimizers.SGD(0.01), loss=keras.losses.MeanSquaredError(reduction=None))


@case("custom losses that return a scalar mean")
def scalar_loss() -> Numbers:
    def loss(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.abs(y - predicted))

    return _train(a.mlp(), loss, weighted=False)


@case("custom scalar losses with `sample_weight`")
def scalar_loss_with_weights() -> Numbers:
    class Scalar(keras.losses.Loss):
        def call(self, y: Any, predicted: Any) -> Any:
            return ops.mean(ops.square(y - predicted))

    found: Numbers = {}
    # On PyTorch, Keras reduces a replica's float64 weights to float32, unless the replica has a single row.
    for dtype in ("float32", "float64") if keras.backend.backend() == "torch" else ("float32",):
        found |= {f"{dtype} {name}": value for name, value in _train(a.mlp(), Scalar(dtype=dtype)).items()}
    return found


@case("weight and activity regularizers")
def regularizers() -> Numbers:
    model = a.mlp(kernel_regularizer=keras.regularizers.L2(0.1), bias_regularizer=keras.regularizers.L1(0.01))
    # Only one layer has it: plain Keras on JAX drops one of several layers' losses in about 1% of the traces.
    model.layers[0].activity_regularizer = keras.regularizers.L2(0.05)
    return _train(model, "mse")


class Penalty(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@case("`add_loss`")
def add_loss() -> Numbers:
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(5, activation="tanh"), Penalty(), keras.layers.Dense(1)]
    )
    return _train(model, "mse")


def _masked_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((7,), dtype="int32"),
            keras.layers.Embedding(11, 5, mask_zero=True),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


@case("masks (mean over the unmasked positions)")
def masks() -> Numbers:
    def scalar(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(y - predicted))

    x = a.tokens()
    y = (x[..., None] * 0.1).astype("float32")
    found: Numbers = {}
    for loss in ("mse", scalar):
        model = _masked_model()
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["mae"], weighted_metrics=["mse"])
        history = a.fit(model, x, y)
        numbers = a.numbers(model, history, score=a.evaluate(model, x, y))
        found |= {f"{loss if loss == 'mse' else 'scalar'} {name}": value for name, value in numbers.items()}
    return found


# Its steps are large, which magnifies rounding errors of sums in a different order.
@case("masks with `sample_weight` and other reductions", atol=1e-5)
def masks_with_weights() -> Numbers:
    x = a.tokens()
    y = (x[..., None] * 0.1).astype("float32")
    found: Numbers = {}
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum"):
        model = _masked_model()
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        rate = 0.001 if reduction == "sum" else 0.2
        model.compile(keras.optimizers.SGD(rate), loss, weighted_metrics=["mae"])
        history = a.fit(model, x, y, sample_weight=np.outer(a.weights(), np.arange(1, 8)).astype("float32"))
        found |= {f"{reduction} {name}": value for name, value in a.numbers(model, history).items()}
    return found


@case("classification losses with label smoothing and logits")
def classification() -> Numbers:
    x, y = a.classes()
    model = a.mlp(4)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.SGD(0.2), loss, metrics=["accuracy"])
    return a.numbers(model, a.fit(model, x, keras.utils.to_categorical(y, 4)))


@case("`sample_weight` of zero for all rows of a replica, and of a batch")
def zero_weights() -> Numbers:
    x, y = a.regression()
    weights = a.weights() + 0.1
    # For 2, 3 and 4 replicas: all rows of the first replica, of a whole batch, and of the last replica.
    weights[: a.BATCH // 2] = weights[a.BATCH : 2 * a.BATCH] = weights[-3:] = 0
    found: Numbers = {}
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum"):
        model = a.mlp()
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        # Adam, because it makes a step even if the gradients of the batch are zero.
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=["mae"], weighted_metrics=["mse"])
        history = a.fit(model, x, y, sample_weight=weights)
        score = a.evaluate(model, x, y, sample_weight=weights)
        found |= {
            f"{reduction} {name}": value for name, value in a.numbers(model, history, score=score).items()
        }
    return found
