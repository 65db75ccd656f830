"""Hooks in the functions that save and load models."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist import handlers
from kdist.keras_hooks.wrapping import strategy_of, temporarily, wrap

if TYPE_CHECKING:
    import keras
    from keras.src.saving.serialization_lib import SafeModeScope

    from kdist.arrays.types import Function


def without_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras does not import TensorFlow to check the types of objects.

    The import takes four seconds and 300 MB if TensorFlow is installed next to another backend. It is not
    needed, because no object of a type exists before its package is imported.
    """
    from keras.src.utils import module_utils

    module: Any = module_utils.tensorflow
    if module.name in sys.modules or module._available is not None:
        return contextlib.nullcontext()
    return temporarily(module, _available=False)


def safe_mode() -> SafeModeScope:
    """Returns a context in which Keras does not deserialize bytecode.

    `keras.config.enable_unsafe_deserialization()` overrides the argument `safe_mode=True`, not this scope.
    """
    from keras.src.saving import serialization_lib

    return serialization_lib.SafeModeScope(True)


def hook_saving() -> None:
    """Wraps the functions that all ways to save a model use, not only `keras.Model.save`."""
    import keras
    from keras.src.callbacks import orbax_checkpoint
    from keras.src.export import saved_model_export_archive as archives
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils import file_utils

    def save(
        original: Function,
        model: keras.Model,
        filepath: str | os.PathLike[str],
        *args: object,
        exports: bool = False,
        **kwargs: object,
    ) -> object:
        strategy = strategy_of(model)
        if strategy is None:
            return original(model, filepath, *args, **kwargs)

        def write(path: str) -> object:
            foreign = contextlib.nullcontext() if exports else without_tensorflow()
            with foreign, strategy.new_variables.left_out():
                return original(model, path, *args, **kwargs)

        return handlers.call("save", strategy, model, filepath, write)

    def ask(
        original: Function,
        self: keras.Model,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        *args: object,
        **kwargs: object,
    ) -> object:
        strategy = strategy_of(self)
        if overwrite or strategy is None or strategy.runtime.worker_index == 0:
            return original(self, filepath, overwrite, *args, **kwargs)
        # Only the chief can ask: an existing file may be the chief's file from the same save.
        with handlers.call("keeping_files"):
            return original(self, filepath, True, *args, **kwargs)

    def load_weights(original: Function, self: keras.Model, /, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        strategy = strategy_of(self)
        if strategy is not None:
            handlers.call("note_loaded", strategy, self)
        return result

    def makedirs(original: Callable[..., None], path: str) -> None:
        try:
            return original(path)
        except FileExistsError:
            # Another worker can create the directory after Keras has checked whether it exists.
            if not file_utils.isdir(path):
                raise

    def state_tree(original: Callable[..., Mapping[str, object]], model: keras.Model) -> Mapping[str, object]:
        strategy = strategy_of(model)
        if strategy is None:
            return original(model)
        # Orbax rejects JAX arrays that only one of several processes holds, but accepts NumPy arrays.
        with strategy.new_variables.left_out(), handlers.call("whole", strategy, model):
            tree = model.get_state_tree(value_format="numpy_array")
        # Orbax writes while training continues, and a NumPy array may share the variable's memory.
        return keras.tree.map_structure(lambda value: value.copy() if value.ndim else value.item(), tree)

    def to_tensorflow(original: Function, archive: object, variable: keras.Variable) -> object:
        if getattr(variable.value, "is_fully_addressable", True):
            return original(archive, variable)
        # JAX cannot read an array that is sharded over workers, but kdist keeps its whole value during a save.
        value = keras.ops.convert_to_numpy(variable)
        facts = {"dtype": variable.dtype, "trainable": variable.trainable, "name": variable.name}
        return archives.tf.Variable(value, **facts)

    wrap(orbax_checkpoint, "_get_state_tree", state_tree)
    # Keras 3.16 uses the first name.
    archive = getattr(archives, "BaseSavedModelExportArchive", None) or archives.SavedModelExportArchive
    wrap(archive, "_convert_to_tf_variable", to_tensorflow)
    wrap(saving_lib, "save_model", save)
    wrap(saving_lib, "save_weights_only", save)
    wrap(legacy_h5_format, "save_model_to_hdf5", save)
    wrap(keras.Model, "save", ask)
    wrap(keras.Model, "save_weights", ask)
    wrap(keras.Model, "export", functools.partial(save, exports=True))
    wrap(keras.Model, "load_weights", load_weights)
    wrap(file_utils, "makedirs", makedirs)
