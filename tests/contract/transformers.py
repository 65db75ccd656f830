"""A small transformer with the layers of a large model, and embeddings with TensorFlow's sparse gradients."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

import kdist
from tests.contract import arrays as a
from tests.contract.case import Numbers, case


class Block(keras.layers.Layer):
    """A block of a transformer, with a normalization over the batch."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dropout=0.0)
        self.norm = keras.layers.LayerNormalization()
        self.wide = keras.layers.Dense(2 * width, activation="gelu")
        self.narrow = keras.layers.Dense(width)
        # Without kdist, Keras supports the argument only on TensorFlow. On one device it changes nothing.
        synchronized = kdist.has_strategy() or keras.backend.backend() == "tensorflow"
        self.batch_norm = keras.layers.BatchNormalization(synchronized=synchronized)

    def call(self, x: Any, training: bool = False) -> Any:
        x = x + self.attention(self.norm(x), self.norm(x), use_causal_mask=True)
        return self.batch_norm(x + self.narrow(self.wide(x)), training=training)


class Transformer(keras.Model):
    """Four blocks, and an embedding whose weights are also the output layer.

    Args:
        dropout: The dropout rate of the embeddings. Each replica draws its own mask.
    """

    def __init__(self, words: int = 12, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(words, width)
        self.dropout = keras.layers.Dropout(dropout)
        self.blocks = [Block(width) for _ in range(4)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.dropout(self.embedding(inputs), training=training)
        for block in self.blocks:
            x = block(x, training=training)
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


@case("transformer with tied embeddings", atol=1e-5)
def transformer() -> Numbers:
    ids = a.tokens()
    model = Transformer()
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return a.numbers(model, a.fit(model, ids[:, :-1], ids[:, 1:]))


class Tied(keras.Model):
    """Uses the same weights for input and output, so that they get a sparse and a dense gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(12, 4)

    def call(self, inputs: Any) -> Any:
        return ops.matmul(ops.mean(self.embedding(inputs), axis=1), ops.transpose(self.embedding.embeddings))


def _train(*optimizers: Any, model_class: Any = None) -> Numbers:
    # Each of twelve words occurs many times in a batch, and in the rows of a replica. The last batch has one
    # row.
    ids = a.tokens(2 * a.BATCH + 1)
    found: Numbers = {}
    for optimizer in optimizers:
        layers = [
            keras.layers.Embedding(12, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(12),
        ]
        model = keras.Sequential(layers) if model_class is None else model_class()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = a.fit(model, ids[:, :-1], ids[:, -1])
        slots = {f"slot {i}": ops.convert_to_numpy(v) for i, v in enumerate(optimizer.variables)}
        found |= {f"{optimizer.name} {k}": v for k, v in a.numbers(model, history, **slots).items()}
    return found


@case("embeddings with `Adam` and repeated words")
def embedding_adam() -> Numbers:
    return _train(keras.optimizers.Adam(0.01))


@case("embeddings with `AdamW` and `global_clipnorm`")
def embedding_adamw_clipped() -> Numbers:
    return _train(keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05))


@case("tied embeddings with `Adam`")
def embedding_tied() -> Numbers:
    return _train(keras.optimizers.Adam(0.01), model_class=Tied)


@case("embeddings with `Adam` and loss scaling, `RMSprop` and accumulation, `Nadam` and EMA")
def embedding_wrapped() -> Numbers:
    return _train(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01, clipnorm=0.05), initial_scale=8.0, dynamic_growth_steps=3
        ),
        keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
        keras.optimizers.Nadam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    )


@case("`jit_compile` with an embedding, masks and losses from layers")
def embedding_jit() -> Numbers:
    ids = a.tokens()
    model = keras.Sequential(
        [
            keras.layers.Embedding(12, 4, mask_zero=True),
            keras.layers.Dense(12, activity_regularizer=keras.regularizers.L2(0.01)),
            keras.layers.BatchNormalization(trainable=False),
        ]
    )
    jit_compile = keras.backend.backend() != "torch"
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    history = a.fit(model, ids[:, :-1], ids[:, 1:])
    scores = a.evaluate(model, ids[:, :-1], ids[:, 1:])
    return a.numbers(model, history, scores=scores, predicted=a.predict(model, ids[:, :-1]))
