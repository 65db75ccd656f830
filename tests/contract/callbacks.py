"""Callbacks that stop or change training: all workers must decide alike, and as one device does."""

from __future__ import annotations

from typing import Any

import keras

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


def _train(*callbacks: Any, rate: float = 0.1, epochs: int = 6) -> Numbers:
    x, y = a.regression()
    model = a.mlp()
    model.compile(keras.optimizers.SGD(rate), "mse")
    history = a.fit(model, x, y, epochs=epochs, callbacks=list(callbacks), validation_data=(x[:9], y[:9]))
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    return a.numbers(model, history, epochs=history.epoch, rate=rate)


@case("`EarlyStopping` with `restore_best_weights`")
def early_stopping() -> Numbers:
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=0.2, patience=1, restore_best_weights=True)
    return _train(stop)


@case("`ReduceLROnPlateau`")
def reduce_lr_on_plateau() -> Numbers:
    return _train(keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3))


@case("`LearningRateScheduler`")
def learning_rate_scheduler() -> Numbers:
    return _train(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7))


@case("`TerminateOnNaN`")
def terminate_on_nan() -> Numbers:
    x, y = a.regression()
    y[20] = float("nan")
    model = a.mlp()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = a.fit(model, x, y, callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"epochs": history.epoch, "steps": model.optimizer.iterations}


class _Recorder(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))
        self.norms.append(float(sum((w**2).sum() for w in self.model.get_weights())))
        if len(self.seen) == 4:
            self.model.stop_training = True


@case("logs and weights that a callback sees after each batch; `model.stop_training`")
def after_each_batch() -> Numbers:
    recorder = _Recorder()
    numbers = _train(recorder)
    return numbers | {"seen": recorder.seen, "norms": recorder.norms}


class _Enough(keras.callbacks.Callback):
    """Stops after two batches of an evaluation or a prediction, and records the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))
        self.model.stop_evaluating = batch == 1

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_predicting = batch == 1


@case("`model.stop_evaluating`, `model.stop_predicting`")
def stop_evaluating_and_predicting() -> Numbers:
    x, y = a.regression()
    model = a.mlp()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    enough = _Enough()
    # With batches of 7 rows, only two of the six batches are used.
    sizes: dict[str, Any] = {"batch_size": 7, "verbose": 0, "callbacks": [enough]}
    predicted = model.predict(x, **sizes)
    score = model.evaluate(x, y, **sizes)
    history = a.fit(model, x, y, validation_data=(x, y), validation_batch_size=7, callbacks=[enough])
    rest = model.predict(x[20:], batch_size=7, verbose=0)  # starts from the beginning: all 18 rows
    return a.numbers(model, history, predicted=predicted, score=score, seen=enough.seen, rest=rest)
