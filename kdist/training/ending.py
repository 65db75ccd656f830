"""What `fit` tells an evaluator that watches the folders of its checkpoints: that training runs, or has ended."""

from __future__ import annotations

import os
import time
from typing import Any

from kdist.backends.contract import Runtime
from kdist.checkpoint import ending
from kdist.training.keras_callbacks import saved_paths
from kdist.whole_files import is_remote


class Ending:
    """The sign of one `fit`: gone while it runs, left by the chief once it has ended as it should.

    Args:
        runtime: Says which worker this is.
        callbacks: Those of `fit`, which say where models are saved.
    """

    def __init__(self, runtime: Runtime, callbacks: Any) -> None:
        self._is_chief = runtime.worker_index == 0
        self._began = time.monotonic()
        self._folders = {_folder_of(path) for path in saved_paths(callbacks) if not is_remote(path)}
        if self._is_chief:
            ending.begin(self._folders)

    def leave(self) -> None:
        """Leaves the sign in those folders, of all to which this `fit` has saved, where one is wanted."""
        if self._is_chief:
            ending.end(filter(ending.is_wanted, {*self._folders, *ending.saved_since(self._began)}))


def _folder_of(path: str) -> str:
    """The folder of a file; of one that is named after the epoch and the logs, as far as it is always the same."""
    fixed = path.partition("{")[0]
    return os.path.dirname(fixed)
