"""`kdist.coordinator`: training with parameter servers, where a coordinator schedules functions on workers.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.names import loaded_on_use

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
__getattr__ = loaded_on_use(__name__, _HOME)

if TYPE_CHECKING:
    from kdist.backends.coordination import (
        PerWorkerValue,
        PerWorkerValues,
        RemoteValue,
        experimental_get_current_worker_index,
    )
    from kdist.coordinator.cluster_coordinator import ClusterCoordinator
