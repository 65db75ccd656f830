"""`kdist.Server`: the server that a task of type "worker" or "ps" runs."""

from __future__ import annotations

from typing import Any

from kdist.backends import get_backend
from kdist.cluster import ClusterSpec
from kdist.cluster.secret import job_secret
from kdist.errors import InvalidArgumentError

_JOBS = ("worker", "ps")


class Server:
    """Serves a coordinator, as a worker or as a parameter server.

    In parameter server training, all tasks run the same script. Tasks of type `"worker"` and `"ps"` create a
    `Server` and stay in `join` until the end of the job.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Server

    Args:
        server_or_cluster_def: A `ClusterSpec`, or a dictionary of the addresses of the tasks by type.
        job_name: `"worker"` or `"ps"`. Optional if the cluster has only one type of task.
        task_index: The index of this task. Optional if there is only one task of this type.
        protocol: The protocol. Only `"grpc"` is supported.
        config: The session configuration of TensorFlow; only used by this backend.
        start: Whether to start the server immediately.

    Raises:
        InvalidArgumentError: If the cluster has no such task.
        ClusterConfigError: If the port is taken; or, on JAX and PyTorch, if other machines can reach a task
            and `KDIST_CLUSTER_TOKEN` is not set.

    Example:

    ```python
    resolver = kdist.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = kdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
        server.join()
    ```
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ) -> None:
        spec = ClusterSpec(server_or_cluster_def)
        job_name, task_index = _task(spec, job_name, task_index)
        if protocol not in (None, "grpc"):
            raise InvalidArgumentError(
                "`protocol` is not supported, because servers use only gRPC.",
                received={"protocol": protocol},
                hint='Remove the argument, or pass protocol="grpc".',
            )
        self._address = spec.task_address(job_name, task_index)
        self._job_name, self._task_index = job_name, task_index
        self._server: Any = None
        self._config = config
        self._spec = spec
        if start:
            self.start()

    @property
    def target(self) -> str:
        """The address of this server: `"grpc://host:port"`."""
        return f"grpc://{self._address}"

    def start(self) -> None:
        """Starts the server, unless it is already running."""
        if self._server is None:
            backend = get_backend()
            if backend.start_server is not None:
                self._server = backend.start_server(
                    self._spec, self._job_name, self._task_index, self._config
                )
            else:
                # Imported here, because this module imports Keras.
                from kdist.coordinator.grpc_server import GrpcServer

                assert backend.coordination_engine is not None
                tasks = [one for job in _JOBS if job in self._spec.jobs for one in self._spec.job_tasks(job)]
                secret = job_secret([address for address in tasks if address is not None])
                engine = backend.coordination_engine()
                self._server = GrpcServer(self._address, self._job_name, engine, secret)

    def join(self) -> None:
        """Serves until the process is terminated. After a job, the server waits for the next coordinator."""
        if self._server is None:
            self.start()
        self._server.join()

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Creates a cluster of one worker on a free port of this machine, and returns its server.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Server#create_local_server
        """
        from kdist.cluster.addresses import free_ports

        return Server({"worker": [f"localhost:{free_ports(1)[0]}"]}, "worker", 0, config=config, start=start)


def _task(spec: ClusterSpec, job_name: str | None, task_index: int | None) -> tuple[str, int]:
    jobs = [job for job in spec.jobs if job in _JOBS]
    if job_name is None and len(spec.jobs) == 1:
        job_name = spec.jobs[0]
    if job_name not in jobs:
        raise InvalidArgumentError(
            '`job_name` is not a job of this cluster that can run servers, which are "worker" and "ps".',
            received={"job_name": job_name, "jobs": spec.jobs},
            hint='For example: kdist.Server(cluster_spec, job_name="worker", task_index=0)',
        )
    if task_index is None and spec.num_tasks(job_name) == 1:
        task_index = 0
    if task_index not in spec.task_indices(job_name):
        raise InvalidArgumentError(
            f"`task_index` is not the index of a task of the job {job_name!r}.",
            received={"task_index": task_index, "job_name": job_name, "tasks": spec.num_tasks(job_name)},
            hint="Choose one of these indices: " + ", ".join(map(str, spec.task_indices(job_name))),
        )
    return job_name, task_index
