"""The components of on-read variables, one per local replica, which last from one `run` to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kdist import keras_hooks
from kdist.backends.aggregation import share_of
from kdist.backends.variable_table import VariableTable

if TYPE_CHECKING:
    import keras


@dataclass
class _Known:
    parts: list[torch.Tensor]
    real: torch.Tensor
    version: int

    def is_valid(self, variable: keras.Variable) -> bool:
        return self.real is keras_hooks.native_value(variable) and self.version == self.real._version


class Components:
    """The local replicas' components of variables that are aggregated when they are read.

    The real variable contains the aggregated value. If other code writes it (`assign`, `fit`,
    `load_weights`), each replica starts again with its share of the new value.
    """

    def __init__(
        self, devices: Sequence[torch.device], replica_ids: Sequence[int], num_replicas: int
    ) -> None:
        self._devices = devices
        self._replica_ids = replica_ids
        self._num_replicas = num_replicas
        self._known: VariableTable[_Known] = VariableTable()
        self._changed: dict[int, keras.Variable] = {}

    def get(self, variable: keras.Variable, index: int) -> torch.Tensor:
        """Returns the component of a local replica."""
        known = self._known.get(variable)
        if known is None or not known.is_valid(variable):
            known = self._known[variable] = self._split(variable)
        return known.parts[index]

    def write(self, variable: keras.Variable, index: int, value: torch.Tensor) -> None:
        self._changed[id(variable)] = variable
        self.get(variable, index).copy_(value)

    def show(self, variable: keras.Variable, total: torch.Tensor) -> None:
        """Writes the aggregated value into the real variable."""
        known = self._known.get(variable)
        assert known is not None
        known.real.detach().copy_(total)
        known.version = known.real._version
        self._changed.pop(id(variable), None)

    def forget_changed(self) -> None:
        """Discards components that were written but not aggregated, after an exception."""
        for variable in self._changed.values():
            self._known.pop(variable)
        self._changed.clear()

    def _split(self, variable: keras.Variable) -> _Known:
        real = keras_hooks.native_value(variable)
        with torch.no_grad():
            parts = [
                share_of(variable, real.detach(), replica_id, self._num_replicas).to(device, copy=True)
                for replica_id, device in zip(self._replica_ids, self._devices, strict=True)
            ]
        return _Known(parts, real, real._version)
