"""Batch normalization over all replicas, and modules of PyTorch inside of Keras models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist import context
from kdist.keras_hooks.wrapping import replace, running_replica, wrap


def hook_torch_modules(zero_grad: Callable[..., Any], call_module: Callable[..., Any]) -> None:
    """Wraps what clears gradients, and what runs modules of PyTorch's own; called once, by the backend."""
    import keras

    replace(keras.Layer, "zero_grad", zero_grad)
    replace(keras.layers.TorchModuleWrapper, "call", call_module)


def hook_embedding(lookup: Callable[[Any, Any], Any]) -> None:
    """Lets a function look up what embeddings are asked for; called once, by the backend.

    Args:
        lookup: Called with the variable and the numbers of rows; returns the rows, or `None` to have Keras look.
    """
    import keras

    def call(original: Callable[..., Any], self: Any, inputs: Any) -> Any:
        if self.lora_enabled or self.quantization_mode:
            return original(self, inputs)
        ids = inputs if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
        found = lookup(self._embeddings, ids)
        return original(self, inputs) if found is None else keras.ops.cast(found, self.compute_dtype)

    wrap(keras.layers.Embedding, "call", call)


def hook_moments(moments: Callable[..., Any]) -> None:
    """Has a function called in place of Keras's `moments`: with the original, then its arguments."""
    from keras.src import backend

    # Keras 3.16 keeps the operations of a backend in a package of their own.
    wrap(backend.nn if hasattr(backend, "nn") else backend.ops.nn, "moments", moments)


def hook_batch_normalization(native: bool) -> None:
    import keras

    def init(
        original: Callable[..., Any], self: Any, /, *args: Any, synchronized: bool = False, **kwargs: Any
    ) -> None:
        wanted = synchronized and context.has_strategy() and not native
        original(self, *args, synchronized=synchronized and not wanted, **kwargs)
        self.synchronized = synchronized

    def moments(
        original: Callable[..., Any], x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
    ) -> Any:
        replica = running_replica()
        if synchronized and replica is not None:
            return replica.moments(x, axes, keepdims)
        # One program over all replicas (JAX), or no replicas at all: the moments are global anyway.
        return original(x, axes, keepdims, synchronized and native)

    wrap(keras.layers.BatchNormalization, "__init__", init)
    hook_moments(moments)
