"""Synchronous training with parameter servers: one replica per worker, and one program over all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from kdist.backends.tensorflow import tasks, workers
from kdist.backends.tensorflow.runtime import TensorFlowRuntime
from kdist.backends.tensorflow.served import Placement
from kdist.cluster import environment
from kdist.cluster.roles import ServerCluster
from kdist.topology import Central, Topology


class SynchronousRuntime(TensorFlowRuntime):
    """Runs replicas on workers, as `CentralStorageStrategy` runs them on the devices of a machine.

    TensorFlow runs the coordinator's programs over all tasks. Variables are not sharded. Each replica copies
    the variables that it reads, and optimizers run on the servers that hold the variables.
    """

    def __init__(self, cluster: ServerCluster, timeout: float) -> None:
        environment.set_default("GRPC_FAIL_FAST", "use_caller")
        found, servers = tasks.of(cluster)
        tasks.require([*found, *servers], timeout)
        tf.config.experimental_connect_to_cluster(
            tasks.native_spec(cluster), job_name="chief", protocol="grpc"
        )
        devices = tuple(task.device for task in found)
        self.placement = Placement([server.device for server in servers], None)
        native = tf.distribute.MirroredStrategy(
            [tasks.COORDINATOR], tf.distribute.ReductionToOneDevice(reduce_to_device=servers[0].device)
        )
        # The constructor accepts only devices of one task, for collectives. A reduction supports other tasks.
        native.extended._initialize_strategy(devices)
        topology = Topology(devices, storage=Central(servers[0].device))
        super().__init__(native, topology, _Remote(found, servers))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Places new variables on the servers in turn."""
        with self.placement.scope():
            yield


class _Remote(workers.Workers):
    """Represents one process, although other tasks run the programs of its replicas."""

    def __init__(self, found: Sequence[tasks.Task], servers: Sequence[tasks.Task]) -> None:
        super().__init__()
        self._tasks = [*found, *servers]

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names the lost tasks, or the error itself if no task is lost."""
        lost = tasks.lost(self._tasks) if isinstance(error, tf.errors.OpError) else []
        return tasks.lost_error(lost) if lost else error
