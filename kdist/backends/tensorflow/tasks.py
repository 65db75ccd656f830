"""The workers and parameter servers of a cluster: starts TensorFlow's servers and checks for lost tasks."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import tensorflow as tf

from kdist.backends.coordination import after_lost_server, wait_for_tasks
from kdist.cluster import ClusterSpec, environment, split_address
from kdist.cluster.addresses import cannot_listen
from kdist.cluster.roles import ServerCluster
from kdist.errors import WorkerLostError

COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"
PATIENCE = 0.2
"""The interval in seconds between two checks of a task."""
_JOBS = ("chief", "worker", "ps")
_ANSWER = 2.0  # timeout in seconds for a connection to a task
_MISSES = 3  # a task is lost after this number of failed checks
_THREADS = 16


def start_server(
    cluster_spec: ClusterSpec, job_name: str, task_index: int, config: tf.compat.v1.ConfigProto | None = None
) -> tf.distribute.Server:
    """Starts TensorFlow's server of a task of type "worker" or "ps"; its `join` waits until it ends.

    The default number of threads exceeds the number of cores, because steps block threads while they wait.
    """
    environment.set_default("GRPC_FAIL_FAST", "use_caller")  # otherwise calls of a task that has ended hang
    if config is None:
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=_THREADS)
    jobs = {job: tasks for job, tasks in cluster_spec.as_dict().items() if job in _JOBS}
    spec = tf.train.ClusterSpec(jobs)
    try:
        return tf.distribute.Server(spec, job_name, task_index, protocol="grpc", config=config)
    except tf.errors.UnknownError as error:  # "Could not start gRPC server"
        raise cannot_listen(cluster_spec.task_address(job_name, task_index)) from error


class Task:
    """A worker or server, with its address and device."""

    def __init__(self, job: str, index: int, address: str, name: str) -> None:
        self.name, self.address = name, address
        self.device = f"/job:{job}/replica:0/task:{index}/device:CPU:0"

    def answers(self) -> bool:
        try:
            socket.create_connection(split_address(self.address), timeout=_ANSWER).close()
        except OSError:
            return False
        return True


def of(cluster: ServerCluster) -> tuple[list[Task], list[Task]]:
    """Returns the tasks of the workers and of the servers."""
    workers = [
        Task("worker", i, address, name)
        for i, (address, name) in enumerate(zip(cluster.workers, cluster.worker_names, strict=True))
    ]
    servers = [
        Task("ps", i, address, name)
        for i, (address, name) in enumerate(zip(cluster.servers, cluster.server_names, strict=True))
    ]
    return workers, servers


def native_spec(cluster: ServerCluster) -> tf.train.ClusterSpec:
    """Returns TensorFlow's description of the cluster."""
    jobs = {"worker": list(cluster.workers), "ps": list(cluster.servers)}
    if cluster.chief is not None:
        jobs["chief"] = [cluster.chief]
    return tf.train.ClusterSpec(jobs)


def require(tasks: Sequence[Task], timeout: float) -> None:
    """Waits until all tasks accept connections; see `wait_for_tasks`."""
    wait_for_tasks(
        [task.name for task in tasks],
        lambda index: tasks[index].answers(),
        lambda index, left: time.sleep(min(left, PATIENCE)),
        timeout,
    )


def lost(tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks that fail several checks."""
    for attempt in range(_MISSES):
        if attempt:
            time.sleep(PATIENCE)
        if not (tasks := [task for task in tasks if not task.answers()]):
            break
    return list(tasks)


def lost_error(tasks: Sequence[Task]) -> WorkerLostError:
    names = ", ".join(task.name for task in tasks)
    return WorkerLostError(
        f"{names} {'has exited or is' if len(tasks) == 1 else 'have exited or are'} unreachable.",
        hint=after_lost_server(),
    )
