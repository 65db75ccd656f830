"""Callbacks for `model.fit` under a strategy. A table of contents.

They run on all workers. Keras's own callbacks work too; see "Saving".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {"BackupAndRestore": "kdist.training.backup", "DriftWatch": "kdist.training.drift"}

__all__ = ["BackupAndRestore", "DriftWatch"]


def __getattr__(name: str) -> Any:
    # They are Keras's callbacks; importing kdist imports no Keras.
    if name not in _HOME:
        raise AttributeError(f"module 'kdist.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from kdist.training.backup import BackupAndRestore
    from kdist.training.drift import DriftWatch
