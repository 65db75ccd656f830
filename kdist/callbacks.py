"""Callbacks for `model.fit` under a strategy. A table of contents.

They run on all workers, but for `SidecarEvaluatorModelExport`, which is the evaluator's. Keras's own callbacks work
too; see "Saving".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BackupAndRestore": "kdist.training.backup",
    "DriftWatch": "kdist.training.drift",
    "RunLog": "kdist.training.run_log",
    "SidecarEvaluatorModelExport": "kdist.coordinator.export",
    "Throughput": "kdist.training.throughput",
}

__all__ = ["BackupAndRestore", "DriftWatch", "RunLog", "SidecarEvaluatorModelExport", "Throughput"]


def __getattr__(name: str) -> Any:
    # They are Keras's callbacks; importing kdist imports no Keras.
    if name not in _HOME:
        raise AttributeError(f"module 'kdist.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from kdist.coordinator.export import SidecarEvaluatorModelExport
    from kdist.training.backup import BackupAndRestore
    from kdist.training.drift import DriftWatch
    from kdist.training.run_log import RunLog
    from kdist.training.throughput import Throughput
