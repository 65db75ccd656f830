"""The copies of variables for replicas on PyTorch that do not use the real variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import keras
import torch

from kdist import keras_hooks
from kdist.backends.torch import seeds
from kdist.backends.variable_table import VariableTable


@dataclass
class _Copy:
    real: torch.Tensor
    copy: torch.Tensor


class VariableCopies:
    """The copies of variables for a local replica that does not use the real variables.

    The copies are leaf tensors on the replica's device. A copy is created at the first access, and updated at
    each step. References to variables are weak, so that the copies do not keep the model alive.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: VariableTable[_Copy] = VariableTable()

    def get(self, variable: keras.Variable) -> torch.Tensor:
        found = self._copies.get(variable)
        if found is None:
            found = self._copies[variable] = self._make(variable)
        return found.copy

    def _make(self, variable: keras.Variable) -> _Copy:
        real = keras_hooks.native_value(variable)
        copy = real.detach().to(self._device, copy=True).requires_grad_(real.requires_grad)
        return _Copy(real, copy)

    def start_step(self, keep_gradients: bool = False) -> None:
        """Updates the copies from the real variables, and clears their gradients by default."""
        for variable, known in self._copies.items():
            if keras_hooks.native_value(variable) is not known.real:
                self._copies[variable] = self._make(variable)
            else:
                if not keep_gradients:
                    known.copy.grad = None
                known.copy.requires_grad_(known.real.requires_grad)
        self.refresh()

    def versions(self) -> dict[int, int]:
        """Returns a version number per variable, which changes with every write."""
        return {id(variable): known.real._version for variable, known in self._copies.items()}

    def refresh(self, unless: Mapping[int, int] | None = None) -> None:
        """Updates the copies from the real variables. Given old `versions`, updates only changed ones."""
        stale = [c for v, c in self._copies.items() if unless is None or c.real._version != unless.get(id(v))]
        if stale:
            with torch.no_grad():
                torch._foreach_copy_([c.copy for c in stale], [c.real.detach() for c in stale])
        for c in stale:
            seeds.follow(c.copy, c.real)

    def forget_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clears the gradients of the copies of some real parameters."""
        copies = {id(known.real): known.copy for _, known in self._copies.items()}
        for key in copies.keys() & {id(parameter) for parameter in parameters}:
            copies[key].grad = None
