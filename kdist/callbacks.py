"""Callbacks for `model.fit` under a strategy.

They run on all workers, except `SidecarEvaluatorModelExport`, which runs in the evaluator. You can also use
Keras's own callbacks; see the page "Save a model from several workers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.names import loaded_on_use

_HOME = {
    "BackupAndRestore": "kdist.training.backup_and_restore",
    "DriftWatch": "kdist.training.drift",
    "RunLog": "kdist.training.run_log",
    "SidecarEvaluatorModelExport": "kdist.coordinator.export",
    "Throughput": "kdist.training.throughput",
}

__all__ = ["BackupAndRestore", "DriftWatch", "RunLog", "SidecarEvaluatorModelExport", "Throughput"]

# The callbacks are subclasses of Keras's, but `import kdist` must not import Keras.
__getattr__ = loaded_on_use(__name__, _HOME)

if TYPE_CHECKING:
    from kdist.coordinator.export import SidecarEvaluatorModelExport
    from kdist.training.backup_and_restore import BackupAndRestore
    from kdist.training.drift import DriftWatch
    from kdist.training.run_log import RunLog
    from kdist.training.throughput import Throughput
