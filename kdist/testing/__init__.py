"""For tests: runs functions in several workers, compares with one device, and detects leaks.

Names are loaded when they are first used, because pytest imports this package in every session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.names import loaded_on_use

_CONTENTS = {
    "kdist.cluster": ("free_ports",),
    "kdist.cluster.keras_backends": ("installed_backends",),
    "kdist.testing.leaks": ("Snapshot", "check", "no_leaks", "snapshot"),
    "kdist.testing.parity": ("assert_parity",),
    "kdist.testing.pool": ("PoolTimeoutError", "WorkerFailure", "WorkerPool"),
    "kdist.testing.workers": ("Workers", "run"),
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = sorted(_HOME)
__getattr__ = loaded_on_use(__name__, _HOME)

if TYPE_CHECKING:
    from kdist.cluster import free_ports
    from kdist.cluster.keras_backends import installed_backends
    from kdist.testing.leaks import Snapshot, check, no_leaks, snapshot
    from kdist.testing.parity import assert_parity
    from kdist.testing.pool import PoolTimeoutError, WorkerFailure, WorkerPool
    from kdist.testing.workers import Workers, run
