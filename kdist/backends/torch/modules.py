"""Lets several replicas of one process share the torch modules of a model.

Keras reads its variables through a scope, which gives each replica its own copy. Two operations bypass the
scope. `zero_grad` clears the gradients of the real parameters, and torch modules inside the model
(`keras.layers.TorchModuleWrapper`) read their parameters directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kdist import keras_hooks
from kdist.backends.torch.copies import VariableCopies
from kdist.backends.torch.replicas import TorchScope
from kdist.context import current_replica

if TYPE_CHECKING:
    import keras


def zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `Layer.zero_grad` to clear the gradients of the current replica."""

    def wrapper(self: keras.Layer, set_to_none: bool = True) -> None:
        copies = _copies()
        if copies is None:
            original(self, set_to_none)
        else:
            copies.forget_gradients(self.parameters())

    return wrapper


def call_module(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps `TorchModuleWrapper.call`, so that the module uses the parameters of the current replica."""

    def wrapper(self: keras.layers.TorchModuleWrapper, *args: object, **kwargs: object) -> object:
        if _copies() is None:
            return original(self, *args, **kwargs)
        # A temporary attribute of the instance is safe, because only one replica runs at a time.
        self.__dict__["module"] = _ModuleOfReplica(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.__dict__.pop("module", None)

    return wrapper


def _copies() -> VariableCopies | None:
    scope = getattr(current_replica(), "scope", None)
    return scope.copies if isinstance(scope, TorchScope) else None


class _ModuleOfReplica:
    """Replaces the torch module of a wrapper, and calls it with the parameters of the current replica."""

    def __init__(self, wrapper: keras.layers.TorchModuleWrapper) -> None:
        self._module = wrapper.module
        self._variables = {id(keras_hooks.native_value(variable)): variable for variable in wrapper.variables}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        copies = _copies()
        if copies is None:
            return self._module(*args, **kwargs)
        own = {name: copies.get(self._variables[id(p)]) for name, p in self._module.named_parameters()}
        return torch.func.functional_call(self._module, own, args, kwargs)
