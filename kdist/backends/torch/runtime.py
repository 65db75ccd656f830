"""`TorchRuntime`: what a strategy holds of PyTorch; its replicas and workers, with what runs in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.backends.contract import StepFunction
from kdist.backends.torch import loops, steps
from kdist.backends.torch.core import TorchCore


class TorchRuntime(TorchCore):
    """Runs functions and steps in the threads of the replicas."""

    def place(self, parts: Sequence[Any]) -> list[Any]:
        """Puts one batch for each local replica on its device."""
        return [
            None if part is None else steps.to_device(part, device)
            for part, device in zip(parts, self.torch_devices, strict=True)
        ]

    def run(
        self, strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Any]:
        """Calls a function in every local replica, one at a time."""
        return loops.run(self, strategy, fn, args, kwargs)

    def step_function(self, model: Any, kind: str) -> StepFunction:
        """Runs a step of the model in every replica; of predictions, gathers the rows."""
        return steps.TorchSteps(self, model, kind)
