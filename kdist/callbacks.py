"""Callbacks for `model.fit` under a strategy. A table of contents.

They run on all workers. Keras's own callbacks work too; see "Saving".
"""

from __future__ import annotations

from kdist.training.backup import BackupAndRestore
from kdist.training.drift import DriftWatch

__all__ = ["BackupAndRestore", "DriftWatch"]
