"""Different ways to write a model."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.hidden(inputs)) * (1.0 if training else 0.5)


@case("subclassed models, built at the first batch")
def subclassed() -> Numbers:
    x, y = a.regression()
    model = Subclassed()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = a.fit(model, x, y)
    return a.numbers(model, history, predicted=a.predict(model, x))


@case("functional models with shared layers")
def functional() -> Numbers:
    inputs = keras.Input((6,))
    shared = keras.layers.Dense(6, activation="tanh")
    outputs = keras.layers.Dense(1)(shared(shared(inputs)))
    return a.train(keras.optimizers.SGD(0.1), keras.Model(inputs, outputs))


class OwnLoss(keras.Model):
    """Overrides `compute_loss` with a scalar mean and its own tracker, as in Keras's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1, kernel_regularizer="l2")
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = ops.mean(ops.square(y - y_pred)) + sum(self.losses)
        self.tracker.update_state(loss)
        return loss


@case("`compute_loss` overridden")
def compute_loss() -> Numbers:
    x, y = a.regression()
    model = OwnLoss()
    model.compile(keras.optimizers.SGD(0.05))
    return a.numbers(model, a.fit(model, x, y))


def _tensorflow_step(model: Any, data: Any) -> Any:
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(y - model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_weights)
    model.optimizer.apply(gradients, model.trainable_weights)
    return _update(model, x, y, loss)


def _torch_step(model: Any, data: Any) -> Any:
    import torch

    x, y = data
    loss = ops.mean(ops.square(y - model(x, training=True)))
    model.zero_grad()
    loss.backward()
    gradients = [v.value.grad for v in model.trainable_weights]
    with torch.no_grad():
        model.optimizer.apply(gradients, model.trainable_weights)
    return _update(model, x, y, loss)


def _update(model: Any, x: Any, y: Any, loss: Any) -> Any:
    model.loss_tracker.update_state(loss)
    model.mae.update_state(y, model(x, training=False))
    return {"loss": model.loss_tracker.result(), "mae": model.mae.result(), "twice": 2.0 * loss}


class OwnStep(keras.Model):
    """A custom `train_step` for TensorFlow and PyTorch, as in Keras's guides."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae]

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> Any:
        step = _tensorflow_step if keras.backend.backend() == "tensorflow" else _torch_step
        return step(self, data)


class OwnStepJax(OwnStep):
    """The same step for JAX, as a function of its state."""

    def _loss(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        predicted, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return ops.mean(ops.square(y - predicted)), non_trainable

    def train_step(self, state: Any, data: Any) -> Any:  # type: ignore[override]
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, non_trainable), gradients = gradient(trainable, non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        predicted, _ = self.stateless_call(trainable, non_trainable, x, training=False)
        own = len(self.loss_tracker.variables)
        losses = self.loss_tracker.stateless_update_state(metrics[:own], loss)
        errors = self.mae.stateless_update_state(metrics[own:], y, predicted)
        logs = {
            "loss": self.loss_tracker.stateless_result(losses),
            "mae": self.mae.stateless_result(errors),
            "twice": 2.0 * loss,
        }
        return logs, (trainable, non_trainable, optimizer, [*losses, *errors])


@case("custom `train_step`")
def custom_train_step() -> Numbers:
    x, y = a.regression()
    model = (OwnStepJax if keras.backend.backend() == "jax" else OwnStep)()
    model.compile(keras.optimizers.Adam(0.05))
    return a.numbers(model, a.fit(model, x, y))
