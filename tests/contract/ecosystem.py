"""Adapted, quantized and ready-made models."""

from __future__ import annotations

import keras

from tests.contract import arrays as a
from tests.contract.case import Numbers, case


def _adapted(quantized: bool) -> Numbers:
    x = a.tokens()
    y = (x.sum(axis=1, keepdims=True) * 0.1).astype("float32")
    embedding, hidden = keras.layers.Embedding(11, 6), keras.layers.Dense(8, activation="tanh")
    layers = [embedding, keras.layers.GlobalAveragePooling1D(), hidden, keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((7,), dtype="int32"), *layers])
    if quantized:
        model.quantize("int8")
    embedding.enable_lora(2)
    hidden.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    history = a.fit(model, x, y)
    return a.numbers(model, history, predicted=a.predict(model, x))


@case("LoRA on `Dense` and `Embedding`")
def lora() -> Numbers:
    return _adapted(quantized=False)


@case("int8 layers with LoRA")
def int8_lora() -> Numbers:
    return _adapted(quantized=True)


@case("GPT-2 from KerasHub with LoRA", atol=1e-5, needs="keras_hub")
def keras_hub_backbone() -> Numbers:
    import keras_hub

    ids = a.tokens()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=12,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=8,
    )
    scores = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = {"token_ids": ids[:, :-1], "padding_mask": (ids[:, :-1] > 0).astype("int32")}
    found: Numbers = {}
    for name in ("whole", "adapted"):
        if name == "adapted":
            backbone.enable_lora(2)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        numbers = a.numbers(model, a.fit(model, x, ids[:, 1:]), predicted=a.predict(model, x))
        found |= {f"{name} {key}": value for key, value in numbers.items()}
    return found


@case("training the last layer, then all layers, then the first")
def fine_tuning() -> Numbers:
    x = a.tokens()
    y = (x.sum(axis=1, keepdims=True) * 0.1).astype("float32")
    embedding, head = keras.layers.Embedding(11, 6), keras.layers.Dense(1)
    model = keras.Sequential(
        [keras.layers.Input((7,), dtype="int32"), embedding, keras.layers.Flatten(), head]
    )
    found: Numbers = {}
    for name, trained in {"last": (False, True), "all": (True, True), "first": (True, False)}.items():
        embedding.trainable, head.trainable = trained
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        numbers = a.numbers(model, a.fit(model, x, y), predicted=a.predict(model, x))
        found |= {f"{name} {key}": value for key, value in numbers.items()}
    return found
