"""The PyTorch functions for kdist's own parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import torch

from kdist.backends.coordination import Engine
from kdist.backends.torch.devices import first_device
from kdist.backends.torch.tables import RowGradient, Table

if TYPE_CHECKING:
    from kdist.arrays.types import Structure
    from kdist.backends.coordination import Record


class TorchEngine(Engine):
    """Native values are parameters. They are written in place, and PyTorch counts the writes."""

    resets_all = True

    def load(
        self, variable: keras.Variable, held: torch.nn.Parameter | None, array: np.ndarray
    ) -> torch.nn.Parameter:
        # Keras may run a layer on the device "meta" to find its output shape. It has no data to copy.
        with keras.device(str(first_device() if held is None else held.device)):
            tensor = keras.ops.convert_to_tensor(array, dtype=variable.dtype)
        if held is None:
            is_trained = variable.trainable and tensor.is_floating_point()
            return torch.nn.Parameter(tensor.clone(), requires_grad=is_trained)
        with torch.no_grad():
            held.copy_(tensor)
        return held

    def mark(self, held: torch.nn.Parameter) -> tuple[int, int]:
        return id(held), held._version

    def is_changed(self, held: torch.nn.Parameter, mark: object) -> bool:
        return self.mark(held) != mark

    def table(self, record: Record) -> Table:
        return Table.of_record(record, record.variable())

    def by_rows(
        self, variable: keras.Variable, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (gradient.row_ids, gradient.row_values) if isinstance(gradient, RowGradient) else None

    def train_step(self, model: keras.Model, data: Structure) -> Structure:
        return model.train_step(keras.tree.map_structure(_tensor, data))

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[np.ndarray], variables: Sequence[keras.Variable]
    ) -> None:
        tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
        with torch.no_grad():
            optimizer.apply(tensors, variables)


def _tensor(leaf: object) -> object:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
