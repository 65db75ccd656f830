"""What kdist's own parameter servers need of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from kdist.backends.coordination import Engine
from kdist.backends.torch.devices import first_device
from kdist.backends.torch.tables import RowGradient, Table


class TorchEngine(Engine):
    """Values are parameters, which are written in place and count how often."""

    def load(self, variable: Any, held: Any, array: np.ndarray) -> torch.nn.Parameter:
        """Copies the numbers into the parameter; makes it at first."""
        # Keras runs a layer on the device "meta" to find its output shape. Nothing can be copied from there.
        with keras.device(str(first_device() if held is None else held.device)):
            tensor = keras.ops.convert_to_tensor(array, dtype=variable.dtype)
        if held is None:
            is_trained = variable.trainable and tensor.is_floating_point()
            return torch.nn.Parameter(tensor.clone(), requires_grad=is_trained)
        with torch.no_grad():
            held.copy_(tensor)
        return held

    def mark(self, held: Any) -> Any:
        """How often it was written to."""
        return id(held), held._version

    def is_changed(self, held: Any, mark: Any) -> bool:
        """Compares the counts."""
        return self.mark(held) != mark

    def table(self, record: Any) -> Table:
        """A tensor that asks for the rows of itself."""
        return Table.of_record(record, record.variable())

    def by_rows(self, variable: Any, gradient: Any) -> tuple[Any, Any] | None:
        """Looks at the gradient's type."""
        return (gradient.row_ids, gradient.row_values) if isinstance(gradient, RowGradient) else None

    def train_step(self, model: Any, data: Any) -> Any:
        """Runs Keras's own step, as it is, on tensors."""
        return model.train_step(keras.tree.map_structure(_tensor, data))

    def apply(self, optimizer: Any, gradients: Sequence[np.ndarray], variables: Sequence[Any]) -> None:
        """Runs the optimizer as it is."""
        tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
        with torch.no_grad():
            optimizer.apply(tensors, variables)


def _tensor(leaf: Any) -> Any:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
