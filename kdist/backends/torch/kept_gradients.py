"""Gradients that the replicas keep on PyTorch until the optimizer needs their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import torch

from kdist import keras_hooks
from kdist.backends.kept_gradients import KeptInReplicas

if TYPE_CHECKING:
    from kdist.backends.torch.core import TorchCore


class TorchKeptGradients(KeptInReplicas):
    """Gradients that the replicas on PyTorch keep."""

    def __init__(self, runtime: TorchCore, model: keras.Model) -> None:
        super().__init__(runtime, model)
        self._sums = [
            [keras_hooks.native_value(v).new_zeros(v.shape, device=device) for v in model.trainable_variables]
            for device in runtime.torch_devices
        ]

    def add(
        self, local_index: int, positions: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        sums = [self._sums[local_index][position] for position in positions]
        with torch.no_grad():
            torch._foreach_add_(sums, [gradient.detach() for gradient in gradients])
        return sums

    def clear(self, local_index: int, positions: Sequence[int]) -> None:
        torch._foreach_zero_([self._sums[local_index][position] for position in positions])

    def take(self) -> list[torch.Tensor]:
        first = self._sums[0]
        totals = [
            torch.stack([s.to(first[i].device) for s in parts]).sum(0)
            for i, parts in enumerate(zip(*self._sums, strict=True))
        ]
        for sums in self._sums:
            torch._foreach_zero_(sums)
        return totals
