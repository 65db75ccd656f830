"""Notifies evaluators that watch the checkpoint directories of `fit` when training has ended."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kdist.backends.contract import Runtime
from kdist.checkpoint import ending
from kdist.training.keras_callbacks import saved_paths
from kdist.whole_files import is_remote

if TYPE_CHECKING:
    import keras


class Ending:
    """Removes the file `.training-ended` when `fit` begins, and writes it after `fit` has succeeded.

    Args:
        runtime: The runtime of this worker. Only the chief removes and writes the file.
        callbacks: The callbacks of `fit`, whose paths show where models are saved.
    """

    def __init__(self, runtime: Runtime, callbacks: keras.callbacks.CallbackList) -> None:
        self._is_chief = runtime.worker_index == 0
        self._began = time.monotonic()
        self._folders = {_folder_of(path) for path in saved_paths(callbacks) if not is_remote(path)}
        if self._is_chief:
            ending.begin(self._folders)

    def leave(self) -> None:
        """Writes the file to the directories of this `fit` that an evaluator watches or will watch."""
        if self._is_chief:
            ending.end(filter(ending.is_wanted, {*self._folders, *ending.saved_since(self._began)}))


def _folder_of(path: str) -> str:
    """Returns the directory of a file, up to the first placeholder in the path."""
    fixed = path.partition("{")[0]
    return os.path.dirname(fixed)
