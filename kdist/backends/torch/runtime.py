"""`TorchRuntime`: what a strategy holds of PyTorch; its replicas and workers, with what runs in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.backends.contract import StepFunction
from kdist.backends.torch import functions, steps
from kdist.backends.torch.core import TorchCore


class TorchRuntime(TorchCore):
    """Runs functions and steps in the threads of the replicas."""

    run = functions.run

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Puts one batch for each local replica on its device."""
        return [
            None if part is None else steps.to_device(part, device)
            for part, device in zip(parts, self.torch_devices, strict=True)
        ]

    def step_function(self, model: Any, kind: str) -> StepFunction:
        """Runs a step of the model in every replica; of predictions, gathers the rows."""
        return steps.TorchSteps(self, model, kind)
