"""What all ways to save and load a model end in."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kdist import handlers
from kdist.keras_hooks.wrapping import strategy_of, wrap


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Within this, Keras does not import TensorFlow to see whether an object is of a type of TensorFlow's.

    Where it is installed beside another backend, that takes four seconds and 300 MB. What was not imported has no
    objects.
    """
    from keras.src.utils import module_utils

    module: Any = module_utils.tensorflow
    if module.name in sys.modules or module._available is not None:
        yield
        return
    module._available = False
    try:
        yield
    finally:
        module._available = None


def safe_mode() -> Any:
    """Returns a context in which Keras makes nothing from bytecode.

    Keras's argument `safe_mode=True` gives way to `keras.config.enable_unsafe_deserialization()`; its scope does not.
    """
    from keras.src.saving import serialization_lib

    return serialization_lib.SafeModeScope(True)


def hook_saving() -> None:
    """What all ways to save a model end in; `keras.Model.save` is only one of them."""
    import keras
    from keras.src.callbacks import orbax_checkpoint
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils import file_utils

    def save(
        original: Callable[..., Any],
        model: Any,
        filepath: Any,
        *args: Any,
        exports: bool = False,
        **kwargs: Any,
    ) -> Any:
        strategy = strategy_of(model)
        if strategy is None:
            return original(model, filepath, *args, **kwargs)

        def write(path: Any) -> Any:
            foreign = contextlib.nullcontext() if exports else without_tensorflow()
            with foreign, strategy.new_variables.left_out():
                return original(model, path, *args, **kwargs)

        return handlers.call("save", strategy, model, filepath, write)

    def ask(
        original: Callable[..., Any],
        self: Any,
        filepath: Any,
        overwrite: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        strategy = strategy_of(self)
        if overwrite or strategy is None or strategy.runtime.worker_index == 0:
            return original(self, filepath, overwrite, *args, **kwargs)
        # A file that is there may be the chief's of this very save: only the chief can ask.
        with handlers.call("keeping_files"):
            return original(self, filepath, True, *args, **kwargs)

    def load_weights(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        strategy = strategy_of(self)
        if strategy is not None:
            handlers.call("note_loaded", strategy, self)
        return result

    def makedirs(original: Callable[..., Any], path: Any) -> Any:
        try:
            return original(path)
        except FileExistsError:
            # Keras asks first whether the folder is there; another worker may make it in between.
            if not file_utils.isdir(path):
                raise

    def state_tree(original: Callable[..., Any], model: Any) -> Any:
        strategy = strategy_of(model)
        if strategy is None:
            return original(model)
        # Orbax refuses arrays of JAX that one process of several holds. It takes NumPy's, as on the other backends.
        with strategy.new_variables.left_out(), handlers.call("whole", strategy, model):
            tree = model.get_state_tree(value_format="numpy_array")
        # Orbax writes while training goes on, and NumPy's array may be the memory of the variable.
        return keras.tree.map_structure(lambda value: value.copy() if value.ndim else value.item(), tree)

    wrap(orbax_checkpoint, "_get_state_tree", state_tree)
    wrap(saving_lib, "save_model", save)
    wrap(saving_lib, "save_weights_only", save)
    wrap(legacy_h5_format, "save_model_to_hdf5", save)
    wrap(keras.Model, "save", ask)
    wrap(keras.Model, "save_weights", ask)
    wrap(keras.Model, "export", functools.partial(save, exports=True))
    wrap(keras.Model, "load_weights", load_weights)
    wrap(file_utils, "makedirs", makedirs)
