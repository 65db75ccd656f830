"""Synchronous training with parameter servers: a replica on each worker, and one program over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdist.backends.tensorflow import tasks, workers
from kdist.backends.tensorflow.runtime import TensorFlowRuntime
from kdist.backends.tensorflow.served import Placement
from kdist.cluster import environment
from kdist.cluster.roles import ServerCluster
from kdist.topology import Central, Topology


class SynchronousRuntime(TensorFlowRuntime):
    """Replicas on the workers of a cluster, as those of `CentralStorageStrategy` are on the devices of a machine.

    TensorFlow runs the coordinator's programs over all tasks. Variables are whole: each replica copies those that it
    reads, and optimizers run where they are.
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
        # Its constructor takes devices of one task alone, over which its collectives go; a reduction goes over others.
        native.extended._initialize_strategy(devices)
        topology = Topology(devices, storage=Central(servers[0].device))
        super().__init__(native, topology, _Remote(found, servers))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Puts variables on the servers, in turn."""
        with self.placement.scope():
            yield


class _Remote(workers.Workers):
    """This process alone, of whose replicas other tasks run the programs."""

    def __init__(self, found: Any, servers: Any) -> None:
        super().__init__()
        self._tasks = [*found, *servers]

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names the tasks that are gone."""
        lost = tasks.lost(self._tasks) if isinstance(error, tf.errors.OpError) else []
        return tasks.lost_error(lost) if lost else error
