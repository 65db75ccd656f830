"""Kinds of data, and batches that the replicas cannot split evenly."""

from __future__ import annotations

import keras
import numpy as np

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


def _compiled(**arguments: object) -> keras.Model:
    model = a.mlp()
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]} | arguments)
    return model


@case("batches that the replicas do not divide, short last batches")
def uneven_batches() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    odd = a.BATCH - 1  # odd, so two replicas cannot split it; three cannot split the last batch of eight
    history = a.fit(model, x, y, batch_size=odd)
    predicted = model.predict(x, batch_size=odd, verbose=0)
    scores = model.evaluate(x, y, batch_size=odd, verbose=0)
    return a.numbers(model, history, predicted=predicted, scores=scores)


@case("fewer rows than replicas")
def one_row_left() -> Numbers:
    x, y = a.regression(a.BATCH + 1)
    model = _compiled()
    history = a.fit(model, x, y, sample_weight=a.weights(a.BATCH + 1))
    return a.numbers(model, history, predicted=a.predict(model, x))


@case("`sample_weight`")
def sample_weight() -> Numbers:
    x, y = a.regression()
    model = _compiled(weighted_metrics=["mse"])
    history = a.fit(model, x, y, sample_weight=a.weights())
    scores = a.evaluate(model, x, y, sample_weight=a.weights())
    return a.numbers(model, history, scores=scores)


@case("`class_weight`")
def class_weight() -> Numbers:
    x, y = a.classes()
    model = a.mlp(4)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    history = a.fit(model, x, y, class_weight={0: 1.0, 1: 0.2, 2: 3.0, 3: 0.0})
    return a.numbers(model, history)


@case("`validation_data`, `validation_split`")
def validation() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    history = a.fit(model, x, y, validation_data=(x[:21], y[:21], a.weights(21)), validation_freq=2)
    more = a.fit(model, x, y, validation_split=0.3)
    return a.numbers(model, history, **{f"split {k}": v for k, v in more.history.items()})


@case("`validation_steps`, `validation_batch_size`, `evaluate(steps=, return_dict=)`, `predict(steps=)`")
def limited_steps() -> Numbers:
    x, y = a.regression()
    model = _compiled(weighted_metrics=["mse"])
    held_out = (x[5:], y[5:], a.weights(a.ROWS - 5))
    history = a.fit(model, x, y, validation_data=held_out, validation_batch_size=7, validation_steps=3)
    scores = model.evaluate(x, y, batch_size=7, steps=2, return_dict=True, verbose=0)
    return a.numbers(
        model,
        history,
        predicted=model.predict(x, batch_size=7, steps=4, verbose=0),  # 28 of the 37 rows
        **{f"score {name}": value for name, value in scores.items()},
    )


@case("`shuffle`, in the order of plain Keras")
def shuffle() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    keras.utils.set_random_seed(11)
    return a.numbers(model, a.fit(model, x, y, shuffle=True, epochs=3))


@case("`initial_epoch`, `steps_per_epoch`")
def epochs_and_steps() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    history = a.fit(model, x, y, steps_per_epoch=2, epochs=5, initial_epoch=2)
    return a.numbers(model, history, epochs=history.epoch)


@case("tensors of the backend")
def backend_tensors() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    history = a.fit(model, keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
    return a.numbers(model, history)


@case("`tf.data.Dataset`")
def tf_dataset() -> Numbers:
    import tensorflow as tf

    x, y = a.regression()
    dataset = tf.data.Dataset.from_tensor_slices((x, y, a.weights())).batch(a.BATCH)
    model = _compiled()
    history = a.fit(model, dataset, batch_size=None, validation_data=dataset)
    scores = model.evaluate(dataset, verbose=0)
    predicted = model.predict(dataset.map(lambda x, y, w: x), verbose=0)
    return a.numbers(model, history, scores=scores, predicted=predicted)


@case("dictionaries, several inputs and outputs")
def dictionaries() -> Numbers:
    left = keras.Input((6,), name="left")
    right = keras.Input((6,), name="right")
    both = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(5, activation="tanh")(both)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(4, name="kind")(hidden),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss={"value": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"value": 0.3, "kind": 2.0},
        metrics={"value": ["mae"], "kind": ["accuracy"]},
    )
    x = {"left": a.features(seed=5), "right": a.features(seed=6)}
    y = {"value": a.regression()[1], "kind": a.classes()[1]}
    history = a.fit(model, x, y, validation_data=(x, y))
    predicted = a.predict(model, x)
    if keras.backend.backend() == "tensorflow" and keras.__version__.startswith("3.16"):
        # In Keras's own loop, the outputs' losses there give every batch the same weight, even a short batch.
        # They therefore do not add up to the loss; see docs/versions.md.
        for name in [name for name in history.history if name.endswith(("kind_loss", "value_loss"))]:
            del history.history[name]
    return a.numbers(model, history, value=predicted["value"], kind=predicted["kind"])


@case("loss of each output in the history and from `evaluate`")
def losses_of_outputs() -> Numbers:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = keras.Model(
        inputs, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(4, name="b")(hidden)]
    )
    model.compile(
        keras.optimizers.SGD(0.1), ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    )
    x, y = a.features(), (a.regression()[1], a.classes()[1])
    history = a.fit(model, x, y, validation_data=(x, y))
    scores = a.evaluate(model, x, y, return_dict=True)
    return a.numbers(model, history, **{f"score {name}": value for name, value in scores.items()})


@case("`train_on_batch`, `test_on_batch`, `predict_on_batch`")
def on_batch() -> Numbers:
    x, y = a.regression()
    model = _compiled()
    trained = [model.train_on_batch(x[i : i + 5], y[i : i + 5], sample_weight=a.weights(5)) for i in range(4)]
    alone = model.train_on_batch(x[:1], y[:1], return_dict=True)
    return a.numbers(
        model,
        trained=trained,
        alone=sorted(alone.values()),
        tested=model.test_on_batch(x[:7], y[:7]),
        predicted=model.predict_on_batch(x[:7]),
    )


@case(
    "`steps_per_execution`",
    backends=("tensorflow", "jax"),
    why_not_all="Keras 3.15 does not support it on PyTorch",
)
def steps_per_execution() -> Numbers:
    x, y = a.regression()
    model = _compiled(steps_per_execution=2)
    history = a.fit(model, x, y, validation_data=(x, y))
    return a.numbers(model, history, predicted=a.predict(model, x))


@case("`run_eagerly`")
def run_eagerly() -> Numbers:
    x, y = a.regression()
    model = _compiled(run_eagerly=True)
    return a.numbers(model, a.fit(model, x, y, validation_data=(x, y)))


@case("`jit_compile`")
def jit_compile() -> Numbers:
    x, y = a.regression()
    model = _compiled(jit_compile=keras.backend.backend() != "torch")
    history = a.fit(model, x, y)
    return a.numbers(model, history, rows=np.array(len(x)))
