"""What torch modules in a model need so that several replicas of one process can share them.

Keras reads its variables through a scope, which shows each replica its own. Two things go around it:
`zero_grad`, which clears the gradients of the real parameters, and modules of PyTorch inside the model
(`keras.layers.TorchModuleWrapper`), which read their parameters directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from kdist.backends.torch.replicas import TorchScope, VariableCopies
from kdist.context import current_replica


@contextmanager
def shared_by_replicas(model: Any) -> Iterator[None]:
    """For the time of a step, lets `zero_grad` and torch modules work on the calling replica's variables.

    Attributes of the instances, gone afterwards. Enter it outside the replicas.
    """
    layers = list({id(layer): layer for layer in [model, *model._flatten_layers()]}.values())
    wrappers = [layer for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper)]
    for layer in layers:
        layer.__dict__["zero_grad"] = _zero_grad(layer)
    for wrapper in wrappers:
        wrapper.__dict__["module"] = _ModuleOfReplica(wrapper)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("zero_grad", None)
        for wrapper in wrappers:
            wrapper.__dict__.pop("module", None)


def _copies() -> VariableCopies | None:
    """The copies of the replica that runs; `None` for one that works on the real variables."""
    scope = getattr(current_replica(), "scope", None)
    return scope.copies if isinstance(scope, TorchScope) else None


def _zero_grad(layer: Any) -> Callable[..., None]:
    original = type(layer).zero_grad.__get__(layer)

    def zero_grad(set_to_none: bool = True) -> None:
        copies = _copies()
        if copies is None:
            original(set_to_none)
        else:
            copies.forget_gradients(layer.parameters())

    return zero_grad


class _ModuleOfReplica:
    """Stands for the torch module of a wrapper, and calls it with the parameters of the replica that runs."""

    def __init__(self, wrapper: Any) -> None:
        self._module = wrapper.module
        self._variables = {id(variable._value): variable for variable in wrapper.variables}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies = _copies()
        if copies is None:
            return self._module(*args, **kwargs)
        own = {name: copies.get(self._variables[id(p)]) for name, p in self._module.named_parameters()}
        return torch.func.functional_call(self._module, own, args, kwargs)
