"""Converts a model in a checkpoint to a file that plain Keras opens without kdist."""

from __future__ import annotations

import keras

from kdist.checkpoint.checked_reading import read_index
from kdist.checkpoint.checkpoint import Checkpoint
from kdist.checkpoint.index import Index
from kdist.errors import CheckpointError, InvalidArgumentError
from kdist.keras_hooks.saving import safe_mode
from kdist.named import call_function
from kdist.whole_files import check_output, is_remote, normal, write_whole

_SUFFIXES = (".weights.h5", ".keras")


def convert(path: str, output: str, name: str | None = None, model: str | None = None) -> str:
    """Writes the model of a checkpoint as `.weights.h5` or `.keras`, by the suffix of `output`.

    `name` selects one of several models. `model` is a function that builds the model, as `"module:function"`. By
    default, Keras builds it from the saved configuration. Returns a note for the user, or "".

    Raises:
        InvalidArgumentError: If the suffix is not supported, the file cannot be written, or the name does not
            select a model.
        CheckpointError: If the checkpoint is corrupt, or Keras cannot build the model.
    """
    if not output.endswith(_SUFFIXES):
        raise InvalidArgumentError(
            "The name of the output file does not end in .weights.h5 or .keras.",
            received={"output": output},
            hint="Use a name such as model.weights.h5 or model.keras.",
        )
    if not is_remote(output):
        check_output(output)
    index = read_index(path)
    name = _name(index, name)
    made, note = (call_function(model), "") if model else _make(path, index, name)
    status = Checkpoint(random=False, **{name: made}).read(path)
    if output.endswith(".keras"):
        write_whole(normal(output), made.save, 0)
        lost = [part for part in status.unused if part == f"{name}.optimizer"]
        note = note or ("The file does not contain the optimizer." if lost else "")
    else:
        write_whole(normal(output), made.save_weights, 0)
    return note


def _name(index: Index, wanted: str | None) -> str:
    models = [name for name, part in index.parts.items() if part["kind"] == "model"]
    if wanted in models:
        return str(wanted)
    if wanted is None and len(models) == 1:
        return models[0]
    found = "several models" if models else "no model"
    raise InvalidArgumentError(
        f"The checkpoint contains {found}."
        if wanted is None
        else f"The checkpoint contains no model {wanted!r}.",
        received={"name": wanted, "models": models},
        hint=f"Choose a model: --name {models[0]}"
        if models
        else "Save the model with: kdist.Checkpoint(model=model)",
    )


def _make(path: str, index: Index, name: str) -> tuple[keras.Model, str]:
    config = index.configs.get(name)
    if config is None:
        raise CheckpointError(
            "Keras cannot build the model, because the checkpoint does not contain its configuration.",
            received={"checkpoint": path, "model": name},
            hint="Name a function that builds the model: --model module:function",
        )
    # Weights do not need a custom loss or metric. If Keras cannot load it, leave out `compile_config`.
    bare = {key: value for key, value in config.items() if key != "compile_config"}
    errors: list[Exception] = []
    for given, note in ((config, ""), (bare, "It is not compiled: Keras cannot load its loss or metrics.")):
        try:
            with safe_mode():  # even if the user enabled unsafe deserialization
                model = keras.saving.deserialize_keras_object(given)
            if not model.built:
                raise ValueError("its input shape is not known")
            return model, note
        except Exception as error:  # Keras and the user's classes may raise anything
            errors.append(error)
    raise CheckpointError(
        f"Keras cannot build the model from its configuration: {errors[0]}",
        received={"checkpoint": path, "model": name},
        hint="Name a function that builds the model: --model module:function",
    ) from errors[0]
