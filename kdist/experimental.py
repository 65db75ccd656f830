"""`kdist.experimental`: the names that `tf.distribute` keeps in its `experimental` module."""

from __future__ import annotations

from typing import Any

from kdist import coordinator
from kdist.communication.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from kdist.coordinator import partitioners
from kdist.coordinator.strategy import ParameterServerStrategy
from kdist.data.input_context import ValueContext
from kdist.names import no_such_name
from kdist.strategies.central_storage import CentralStorageStrategy
from kdist.strategies.multi_worker_mirrored import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from kdist.strategies.tpu import ExperimentalTPUStrategy as TPUStrategy
from kdist.synchrony import check_in_sync
from kdist.training.preemption import PreemptionCheckpointHandler, TerminationConfig

# An older name for the same class.
CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "check_in_sync",
    "coordinator",
    "partitioners",
]


def __getattr__(name: str) -> Any:
    raise no_such_name(__name__, name, __all__)
