"""A small transformer, with what large ones have."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

import kdist
from kdist.testing.conformance import arrays as a
from kdist.testing.conformance.case import Numbers, case


class Block(keras.layers.Layer):
    """A block of a transformer, with a normalisation over the batch."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dropout=0.0)
        self.norm = keras.layers.LayerNormalization()
        self.wide = keras.layers.Dense(2 * width, activation="gelu")
        self.narrow = keras.layers.Dense(width)
        # Without kdist, Keras knows the argument on TensorFlow only; on one device it changes nothing.
        synchronized = kdist.has_strategy() or keras.backend.backend() == "tensorflow"
        self.batch_norm = keras.layers.BatchNormalization(synchronized=synchronized)

    def call(self, x: Any, training: bool = False) -> Any:
        x = x + self.attention(self.norm(x), self.norm(x), use_causal_mask=True)
        return self.batch_norm(x + self.narrow(self.wide(x)), training=training)


class Transformer(keras.Model):
    """Four blocks, and an embedding that reads words and writes them: its weights are tied.

    Args:
        dropout: A part of the embeddings that is dropped in training. Each replica draws its own.
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


@case("a transformer with tied embeddings", atol=1e-5)
def transformer() -> Numbers:
    ids = a.tokens()
    model = Transformer()
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return a.numbers(model, a.fit(model, ids[:, :-1], ids[:, 1:]))
