"""Loads the weights and the optimizer's step counter from a checkpoint."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from contextlib import ExitStack
from typing import IO

import h5py
import keras
import numpy as np

from kdist import keras_hooks
from kdist.checkpoint.restoring import restore_weights
from kdist.coordinator.watching import Watched
from kdist.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)


def load(item: Watched, model: keras.Model) -> None:
    """Loads the weights of a checkpoint into a model, and the optimizer's step counter for callbacks.

    Raises:
        CheckpointCorruptError: If it is corrupt, incomplete, or changed during the read.
        CheckpointNotFoundError: If it was deleted.
        CheckpointMismatchError: If it does not match the model.
    """
    if not item.is_file:
        restore_weights(item.path, model)
        return
    try:
        iterations = _load_file(item.path, model)
    except ValueError as error:
        raise CheckpointMismatchError(
            f"The checkpoint does not match the model {model.name!r}.",
            received={"path": item.path, "error": str(error)},
            hint="Create the model with the code that trained it.",
        ) from error
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            "The checkpoint was deleted before the evaluator could read it.",
            received={"path": item.path},
            hint="Keep each checkpoint until the evaluator has read it.",
        ) from error
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(item, error) from error
    if item.has_changed:
        raise _damaged(item, "it was modified while the evaluator read it")
    optimizer = getattr(model, "optimizer", None)
    if iterations is not None and optimizer is not None:
        keras_hooks.step_variable(optimizer).assign(iterations)


def _load_file(path: str, model: keras.Model) -> np.integer | None:
    """Loads a Keras file, and returns the optimizer's step counter; `None` if it has no optimizer."""
    with ExitStack() as stack:
        source: str | IO[bytes] = path
        if path.endswith(".keras"):
            archive = stack.enter_context(zipfile.ZipFile(path))
            broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(f"the checksum of {broken} does not match")
            source = stack.enter_context(archive.open("model.weights.h5"))
        file = stack.enter_context(h5py.File(source, "r"))
        optimizer = "optimizer"
        while f"{optimizer}/inner_optimizer" in file:  # as in `keras_hooks.step_variable`
            optimizer += "/inner_optimizer"
        saved = file.get(f"{optimizer}/vars/0")
        iterations = None if saved is None or saved.shape else saved[()]
    with warnings.catch_warnings():
        # The evaluator's optimizer has no slot variables.
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        model.load_weights(path)
    return iterations


def _damaged(item: Watched, why: object) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        "The checkpoint is corrupt or incomplete.",
        received={"path": item.path, "error": str(why)},
        hint="Wait for the next checkpoint, or save this checkpoint again.",
    )
