"""`TorchRuntime`: the runtime of a strategy on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.backends.contract import StepFunction
from kdist.backends.torch import functions, steps
from kdist.backends.torch.core import TorchCore

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Structure


class TorchRuntime(TorchCore):
    """Runs functions and steps in the threads of the replicas."""

    run = functions.run

    def place(self, parts: Sequence[Structure]) -> list[Structure]:
        return [
            None if part is None else steps.to_device(part, device)
            for part, device in zip(parts, self.torch_devices, strict=True)
        ]

    def step_function(self, model: keras.Model, kind: str) -> StepFunction:
        return steps.TorchSteps(self, model, kind)
