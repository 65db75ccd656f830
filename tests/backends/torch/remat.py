"""A model with Dropout; dropped.py computes its gradient by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

import kdist

UNITS = 8
WAYS = ("scope", "function", "nested")


class Dropping(keras.Model):
    """Applies dropout to a linear layer, and records the outputs.

    Args:
        way: How the backward pass recomputes the dropout: in a `RematScope`, in a `keras.remat`, or in both.
        seed: The seed of the dropout.
    """

    def __init__(self, way: str, seed: int | None) -> None:
        super().__init__()
        self.records: dict[int, np.ndarray] = {}  # the last outputs of each replica
        with keras.RematScope("full" if way in ("scope", "nested") else None):
            self.dropout = keras.layers.Dropout(0.5, seed=seed)
        self.inner = keras.remat(self._inner) if way in ("function", "nested") else self._inner

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), initializer="glorot_uniform")

    def _inner(self, x: Any, training: bool) -> Any:
        return self.dropout(keras.ops.matmul(x, self.kernel), training=training)

    def call(self, x: Any, training: bool = False) -> Any:
        outputs = self.inner(x, training)
        if training and isinstance(outputs, torch.Tensor) and outputs.device.type != "meta":
            replica = kdist.get_replica_context()
            self.records[replica.replica_id_in_sync_group if replica else 0] = outputs.detach().numpy()
        return outputs
