"""Batch normalization over all replicas, embeddings, `adapt`, and PyTorch modules inside Keras models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kdist import handlers
from kdist.keras_hooks.wrapping import replace, running_model_replica, running_replica, wrap

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import Function
    from kdist.values import Tensor


def hook_torch_modules(zero_grad: Callable[..., Function], call_module: Callable[..., Function]) -> None:
    """Replaces `Layer.zero_grad` and `TorchModuleWrapper.call`; the backend calls this once."""
    import keras

    replace(keras.Layer, "zero_grad", zero_grad)
    replace(keras.layers.TorchModuleWrapper, "call", call_module)


def hook_embedding(lookup: Callable[[keras.Variable, Tensor], Tensor | None]) -> None:
    """Sets a function that looks up rows of a variable for `Embedding` layers; the backend calls this once.

    It returns `None` to use Keras's lookup.
    """
    import keras

    def call(original: Function, self: keras.layers.Embedding, inputs: Tensor) -> object:
        if self.lora_enabled or self.quantization_mode:
            return original(self, inputs)
        ids = inputs if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
        found = lookup(self._embeddings, ids)
        return original(self, inputs) if found is None else keras.ops.cast(found, self.compute_dtype)

    wrap(keras.layers.Embedding, "call", call)


def hook_torch_images() -> None:
    """Leaves images with channels last as they are in the steps of PyTorch; the backend calls this once.

    Keras copies them to channels first, because some of PyTorch's operations need it. Convolutions and pooling do not:
    https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    nn = _operations()
    keras_transposes = getattr(nn, "_transpose_spatial_inputs", None)
    if keras_transposes is None or len(inspect.signature(keras_transposes).parameters) > 1:
        return  # Keras 3.16 chooses the memory format itself

    def transpose(original: Function, images: Any) -> object:
        if images.ndim == 4 and running_model_replica() is not None:
            return images.permute(0, 3, 1, 2)
        return original(images)

    wrap(nn, "_transpose_spatial_inputs", transpose)


def _operations() -> ModuleType:
    from keras.src import backend

    # Keras 3.16 moves the operations of a backend to a separate package.
    return backend.nn if hasattr(backend, "nn") else backend.ops.nn


def hook_moments(moments: Function) -> None:
    """Replaces Keras's `moments` with a function, which receives the original and its arguments."""
    wrap(_operations(), "moments", moments)


def hook_batch_normalization(native: bool) -> None:
    import keras

    def init(
        original: Function,
        self: keras.layers.BatchNormalization,
        /,
        *args: object,
        synchronized: bool = False,
        **kwargs: object,
    ) -> None:
        wanted = synchronized and not native
        original(self, *args, synchronized=synchronized and not wanted, **kwargs)
        self.synchronized = synchronized

    def moments(
        original: Function, x: Tensor, axes: Sequence[int], keepdims: bool = False, synchronized: bool = False
    ) -> object:
        replica = running_replica()
        if synchronized and replica is not None:
            return replica.moments(x, axes, keepdims)
        # Without replicas, or with one program over all of them (JAX), the moments are already global.
        return original(x, axes, keepdims, synchronized and native)

    def masked_moments(
        original: Function, self: keras.layers.BatchNormalization, inputs: Tensor, mask: Tensor | None
    ) -> object:
        replica = running_replica()
        if mask is None or replica is None or not self.synchronized:
            return original(self, inputs, mask)
        # Keras only synchronizes inputs without a mask.
        ops = keras.ops
        whole = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(inputs))
        return replica.moments(inputs, self._reduction_axes, mask=ops.cast(whole, "bool"))

    wrap(keras.layers.BatchNormalization, "__init__", init)
    wrap(keras.layers.BatchNormalization, "_moments", masked_moments)
    hook_moments(moments)


def hook_adapt() -> None:
    """Makes `adapt` refuse distributed datasets: each worker would adapt a layer to its own rows."""
    import keras

    def adapt(original: Function, self: keras.Layer, data: object, *args: object, **kwargs: object) -> object:
        handlers.call("refuse_to_adapt", self, data)
        return original(self, data, *args, **kwargs)

    for name in ("Normalization", "Discretization", "TextVectorization", "StringLookup", "IntegerLookup"):
        wrap(getattr(keras.layers, name), "adapt", adapt)
