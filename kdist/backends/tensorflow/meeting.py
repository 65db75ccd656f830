"""Meeting on TensorFlow: waits until all workers of a cluster are there, and prepares its coordination service."""

from __future__ import annotations

import re

from tensorflow.python.eager import context as eager_context

from kdist.backends.joining import missing_error, wait_for_all
from kdist.cluster import Cluster, liveness
from kdist.errors import ClusterConfigError, StrategyScopeError

TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")
"""How TensorFlow names a worker."""
# After this share of the timeout without a heartbeat, TensorFlow's coordination service takes a worker for lost.
_SILENCE = 0.5


def meet(cluster: Cluster, timeout: float) -> tuple[str, ...]:
    """Waits until all workers are there; returns their addresses.

    TensorFlow waits too, but its chief does so forever, whatever time it is given to register.
    """
    known = tuple(address for address in cluster.addresses if address)
    if cluster.coordinator_taken or len(known) < cluster.num_workers:
        return wait_for_all(cluster, None, timeout)
    wait_for_all(cluster, known[0], timeout)
    return known


def configure_heartbeats(num_workers: int, timeout: float) -> None:
    """Tells the coordination service how long workers may be silent, and have to register."""
    from tensorflow.core.protobuf import config_pb2  # noqa: F401  (makes the coordination protos known)
    from tensorflow.python.framework import config  # noqa: F401

    job = eager_context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=num_workers)
    # `tf.distribute` configures the service itself with its default of 10 s to register, unless it is there.
    eager_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(liveness.heartbeat_timeout() * _SILENCE * 1000),
        cluster_register_timeout_in_ms=int(timeout * 1000),
        coordinated_jobs=[job],
    )


def joining_error(error: Exception, cluster: Cluster, timeout: float) -> Exception:
    """Returns what to raise where the native strategy could not be made."""
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
