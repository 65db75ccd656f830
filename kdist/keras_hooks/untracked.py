"""The state of layers that Keras does not keep in variables, and that its own files contain all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np


def finish_loading(layer: keras.Layer) -> None:
    """Lets layers compute what they derive from their variables, after these were assigned.

    Keras's `Normalization` computes with such constants. It derives them at the end of `load_own_variables`, which
    Keras calls when it loads a file.
    """
    import keras

    for inner in layer._flatten_layers():
        kind = type(inner)
        is_plain = kind.load_own_variables is keras.Layer.load_own_variables
        # Layers that also write their own format, such as `Dense`, derive nothing.
        if not is_plain and kind.save_own_variables is keras.Layer.save_own_variables:
            store: dict[str, object] = {}
            inner.save_own_variables(store)
            inner.load_own_variables(store)


class Boundaries:
    """The boundaries of a `Discretization` layer, which `adapt` sets. Keras stores them in its configuration."""

    def __init__(self, layer: keras.layers.Discretization) -> None:
        self._layer = layer

    def get_state(self) -> object:
        return self._layer.bin_boundaries

    def set_state(self, state: object) -> None:
        self._layer.bin_boundaries = state


def boundaries(layer: keras.Layer) -> Iterator[Boundaries]:
    """Yields the boundaries of each `Discretization` layer that has them from `adapt`, not from its constructor."""
    import keras

    for inner in layer._flatten_layers():
        if isinstance(inner, keras.layers.Discretization) and inner.num_bins is not None:
            yield Boundaries(inner)


class Buffer:
    """A tensor of a PyTorch module, such as a moving statistic. It has what a checkpoint needs of a variable."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        import keras

        return keras.ops.convert_to_numpy(self._tensor)

    def assign(self, value: np.ndarray) -> None:
        """Replaces the values."""
        import keras

        # In place, because the module and recorded steps refer to the tensor.
        self._tensor.detach().copy_(keras.ops.convert_to_tensor(value))


def buffers(layer: keras.Layer) -> dict[str, Buffer]:
    """Returns the buffers of wrapped PyTorch modules, except buffers that PyTorch's `state_dict` omits."""
    import keras

    wrappers = [
        inner for inner in layer._flatten_layers() if isinstance(inner, keras.layers.TorchModuleWrapper)
    ]
    found: dict[str, Buffer] = {}
    for number, wrapper in enumerate(wrappers):
        kept = wrapper.module.state_dict()
        named = wrapper.module.named_buffers()
        found |= {f"{number}/{name}": Buffer(tensor) for name, tensor in named if name in kept}
    return found
