"""Rendezvous on TensorFlow: waits for all workers of a cluster, and configures the coordination service."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorflow.python.eager import context as eager_context

from kdist.cluster import Cluster, timeouts
from kdist.control.channel import Channel
from kdist.control.joining import OpenChannel
from kdist.control.rendezvous import missing_error
from kdist.errors import ClusterConfigError, StrategyScopeError

TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")
"""Matches TensorFlow's name of a worker."""
# TensorFlow's coordination service regards a worker as lost after this multiple of the heartbeat timeout. The
# channel detects each loss earlier.
_SILENCE = 2.0


def open_channel(cluster: Cluster, connect: OpenChannel) -> tuple[Sequence[str], Channel]:
    """Waits until all workers have joined, and returns their addresses and the connections.

    TensorFlow also waits, but its chief waits forever and ignores the timeout for registration.
    """
    known = tuple(address for address in cluster.addresses if address)
    if cluster.coordinator_taken or len(known) < cluster.num_workers:
        return connect(None)
    return known, connect(known[0])[1]


def configure_heartbeats(num_workers: int, timeout: float) -> None:
    """Sets the heartbeat timeout and the registration timeout of the coordination service."""
    from tensorflow.core.protobuf import config_pb2  # noqa: F401  (registers the coordination protos)
    from tensorflow.python.framework import config  # noqa: F401

    job = eager_context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=num_workers)
    # Otherwise, `tf.distribute` configures the service with its default of 10 s to register.
    eager_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(timeouts.heartbeat_timeout() * _SILENCE * 1000),
        cluster_register_timeout_in_ms=int(timeout * 1000),
        coordinated_jobs=[job],
    )


def joining_error(error: Exception, cluster: Cluster, timeout: float) -> Exception:
    """Returns the error to raise if the native strategy cannot be created."""
    text = str(error)
    me = cluster.worker_names[cluster.worker_index]
    if "program startup" in text or "initialized" in text:
        return StrategyScopeError(
            "Cannot join the workers: TensorFlow has already started.",
            hint="Create the strategy at the start of the program, before you use TensorFlow.",
        )
    if "Could not start gRPC server" in text or "bind" in text:
        return ClusterConfigError(
            "The address of this worker is in use by another process.",
            received={"worker": me},
            hint="Choose another port, or terminate that process.",
        )
    missing = {int(task) for task in TASK.findall(text)} - {cluster.worker_index}
    return missing_error(cluster, timeout, missing)
