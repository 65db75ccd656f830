"""Joining the workers of a cluster on TensorFlow, and what they tell each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from kdist.cluster import environment
from kdist.cluster.exchange import complete_addresses
from kdist.errors import ClusterConfigError, DeviceError, StrategyScopeError, WorkerLostError, WorkerTimeoutError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.strategies.communication import CommunicationOptions

# Heartbeats of TensorFlow's coordination service; a lost worker is noticed after this time at the latest.
_HEARTBEAT_SECONDS = 10
_TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")

_joined: tuple[Cluster, tf.distribute.Strategy] | None = None


class Workers:
    """The workers of a cluster, joined by `tf.distribute.MultiWorkerMirroredStrategy`.

    Args:
        cluster: Who takes part.
        native: The native strategy, whose collectives carry the messages.
    """

    def __init__(self, cluster: Cluster, native: tf.distribute.Strategy) -> None:
        self.num_workers = cluster.num_workers
        self.worker_index = cluster.worker_index
        self._names = cluster.worker_names
        self._native = native

    def all_gather_rows(self, local: Any, sizes: Sequence[int]) -> Any:
        """Concatenates the rows of every worker, which may have different numbers of them.

        Args:
            local: This worker's rows, a tensor.
            sizes: Number of rows of each worker.
        """
        longest = max(sizes)
        padding = [[0, longest - sizes[self.worker_index]]] + [[0, 0]] * (len(local.shape) - 1)
        everyone = self._gather(tf.pad(local, padding))
        return tf.concat([everyone[i * longest : i * longest + size] for i, size in enumerate(sizes)], axis=0)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from each worker: first the lengths, then the bytes."""
        lengths = [int(n) for n in self._gather(tf.constant([len(data)], tf.int32))]
        # Collectives know no uint8 on every device; int32 is understood everywhere.
        rows = self.all_gather_rows(tf.constant(np.frombuffer(data, np.uint8).astype(np.int32)), lengths)
        flat = rows.numpy().astype(np.uint8).tobytes()
        ends = np.cumsum(lengths)
        return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _gather(self, value: Any) -> Any:
        """Gathers equal shapes over the workers through the first replica of each."""
        native = self._native
        local = native.extended.worker_devices
        if len(local) > 1:
            value = native.experimental_distribute_values_from_function(lambda _: value)
        gathered = native.gather(value, axis=0)
        if len(local) == 1:
            return gathered
        step = int(gathered.shape[0]) // (self.num_workers * len(local))
        parts = [gathered[i * len(local) * step : (i * len(local) + 1) * step] for i in range(self.num_workers)]
        return tf.concat(parts, axis=0)

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns a `WorkerLostError` for an engine error about another worker."""
        kinds = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError)
        text = str(error)
        if not isinstance(error, kinds) and "task:" not in text:
            return error
        others = {int(task) for task in _TASK.findall(text)} - {self.worker_index}
        if not others and not isinstance(error, kinds):
            return error
        lost = [self._names[i] for i in sorted(others) if i < self.num_workers]
        named = ", ".join(lost) or "another worker"
        return WorkerLostError(
            f"The job cannot go on without {named}, which has died or cannot be reached any more.",
            received={"this_worker": self._names[self.worker_index], "error": text.splitlines()[0][:200]},
            hint="Look at that worker's log, then start the job again.",
        )


def join(
    cluster: Cluster, options: CommunicationOptions, devices: Sequence[str]
) -> tuple[tf.distribute.Strategy, Workers]:
    """Waits for all workers of the cluster and returns the native strategy and the workers.

    Raises:
        WorkerTimeoutError: A worker did not come in time.
        ClusterConfigError: The address of this worker is taken.
        StrategyScopeError: It is too late, or this process has joined another cluster.
        DeviceError: Several CPU devices a worker, which `tf.distribute` cannot do.
    """
    global _joined
    if len(devices) > 1 and devices[0].startswith("cpu:"):
        raise DeviceError(
            "On TensorFlow a worker of MultiWorkerMirroredStrategy has its GPUs or one CPU.",
            received={"devices": tuple(devices)},
            hint="Start one worker a CPU device instead: kdist run --num-workers 2 train.py",
        )
    if _joined is not None:
        if (_joined[0].spec, _joined[0].worker_index) != (cluster.spec, cluster.worker_index):
            raise StrategyScopeError(
                "A process can join one cluster only, and this one has already joined another.",
                received={"joined": _joined[0].addresses, "wanted": cluster.addresses},
            )
        return _joined[1], Workers(cluster, _joined[1])
    timeout = float(environment.get("KDIST_JOIN_TIMEOUT", "300") or 300)
    addresses = complete_addresses(cluster, timeout)
    _configure_heartbeats(len(addresses), timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=cluster.worker_index,
        rpc_layer=cluster.rpc_layer or "grpc",
        num_accelerators={"GPU": len(devices)} if devices[0].startswith("gpu:") else None,
    )
    native_options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[options.implementation.name],
    )
    try:
        native = tf.distribute.MultiWorkerMirroredStrategy(resolver, native_options)
    except (RuntimeError, tf.errors.OpError) as error:
        raise _joining_error(error, cluster, timeout) from error
    _joined = (cluster, native)
    return native, Workers(cluster, native)


def _configure_heartbeats(num_workers: int, timeout: float) -> None:
    from tensorflow.core.protobuf import config_pb2  # noqa: F401  (makes the coordination protos known)
    from tensorflow.python.framework import config  # noqa: F401

    job = eager_context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=num_workers)
    # `tf.distribute` configures the service itself with its default of 10 s to register, unless it is there.
    eager_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=_HEARTBEAT_SECONDS * 1000,
        cluster_register_timeout_in_ms=int(timeout * 1000),
        coordinated_jobs=[job],
    )


def _joining_error(error: Exception, cluster: Cluster, timeout: float) -> Exception:
    text = str(error)
    me = cluster.worker_names[cluster.worker_index]
    if "program startup" in text or "initialized" in text:
        return StrategyScopeError(
            "The workers must be joined before TensorFlow has computed anything, and it already has.",
            hint="Create kdist.MultiWorkerMirroredStrategy() at the start of the program.",
        )
    if "Could not start gRPC server" in text or "bind" in text:
        return ClusterConfigError(
            "Another process listens at the address of this worker.",
            received={"worker": me},
            hint="Choose another port, or end that process.",
        )
    missing = sorted({int(task) for task in _TASK.findall(text)} - {cluster.worker_index})
    named = ", ".join(cluster.worker_names[i] for i in missing if i < cluster.num_workers) or "some workers"
    return WorkerTimeoutError(
        f"All {cluster.num_workers} workers must come within {timeout:g} s, but {named} did not.",
        received={"this_worker": me, "error": text.splitlines()[0][:200]},
        hint="Start the missing workers, or wait longer: KDIST_JOIN_TIMEOUT=600",
    )
