"""`kdist.coordinator`: training with parameter servers, where a coordinator schedules functions on workers.

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kdist.names import no_such_name

_HOME = {
    "ClusterCoordinator": "kdist.coordinator.cluster_coordinator",
    "PerWorkerValue": "kdist.backends.coordination",
    "PerWorkerValues": "kdist.backends.coordination",
    "RemoteValue": "kdist.backends.coordination",
    "experimental_get_current_worker_index": "kdist.backends.coordination",
}
__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise no_such_name(__name__, name, __all__)
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from kdist.backends.coordination import (
        PerWorkerValue,
        PerWorkerValues,
        RemoteValue,
        experimental_get_current_worker_index,
    )
    from kdist.coordinator.cluster_coordinator import ClusterCoordinator
