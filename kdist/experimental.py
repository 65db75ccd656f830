"""`kdist.experimental`: the names that `tf.distribute` keeps in its `experimental` module."""

from kdist.data.input_context import ValueContext
from kdist.strategies.communication import CommunicationImplementation, CommunicationOptions
from kdist.strategies.multi_worker_mirrored import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from kdist.synchrony import check_in_sync
from kdist.training.preemption import PreemptionCheckpointHandler, TerminationConfig

# The older name of the same class.
CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
    "check_in_sync",
]
