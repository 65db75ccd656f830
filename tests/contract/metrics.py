"""Metrics count the rows of all replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


@case("classification metrics (AUC, precision, recall, F1, IoU, top-k)")
def classification_metrics() -> Numbers:
    x, y = a.classes()
    model = a.mlp(4, activation="softmax")
    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(thresholds=[0.2, 0.5], name="recall"),
        keras.metrics.F1Score(name="f1"),
        keras.metrics.OneHotMeanIoU(num_classes=4, name="iou"),
        keras.metrics.TopKCategoricalAccuracy(k=2, name="top2"),
        keras.metrics.CategoricalAccuracy(name="accuracy"),
        keras.metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
    ]
    model.compile(keras.optimizers.SGD(0.3), "categorical_crossentropy", metrics=metrics)
    labels = keras.utils.to_categorical(y, 4)
    history = a.fit(model, x, labels, sample_weight=None)
    history.history = {name: np.array(values, dtype="float64") for name, values in history.history.items()}
    return a.numbers(model, history)


@case("regression metrics (RMSE, R², cosine similarity, correlation)")
def regression_metrics() -> Numbers:
    x = a.features()
    y = x[:, :3] * 2 - x[:, 3:]  # several columns: the correlation of a single value is NaN
    model = a.mlp(3)
    metrics = [
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.CosineSimilarity(name="cosine"),
        keras.metrics.LogCoshError(name="logcosh"),
        keras.metrics.PearsonCorrelation(name="correlation"),
    ]
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics, weighted_metrics=["mape"])
    history = a.fit(model, x, y, sample_weight=a.weights())
    return a.numbers(model, history, score=a.evaluate(model, x, y))


class Share(keras.metrics.Metric):
    """A custom metric: the share of predictions above zero."""

    def __init__(self, name: str = "share", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.above = self.add_variable((), "zeros", name="above")
        self.all = self.add_variable((), "zeros", dtype="int32", name="all")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.above.assign_add(ops.sum(ops.cast(predicted > 0, self.above.dtype)))
        self.all.assign_add(ops.cast(ops.size(predicted), "int32"))

    def result(self) -> Any:
        return self.above / ops.cast(self.all, self.above.dtype)


@case("custom metrics (classes, functions of rows, functions that return a scalar)")
def custom_metrics() -> Numbers:
    def largest(y: Any, predicted: Any) -> Any:
        return ops.max(ops.abs(y - predicted), axis=-1)

    def scalar(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(y - predicted))

    x, y = a.regression()
    model = a.mlp()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Share(), largest, scalar])
    history = a.fit(model, x, y)
    return a.numbers(model, history, score=a.evaluate(model, x, y))
