"""`SageMakerClusterResolver`, which reads the hosts of an Amazon SageMaker training job."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kdist.cluster.addresses import join_address, split_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.resolver import Task, TaskClusterResolver, require

_HINT = 'Set the variables as SageMaker does, for example:\nSM_HOSTS=\'["algo-1", "algo-2"]\' SM_CURRENT_HOST=algo-1'


class SageMakerClusterResolver(TaskClusterResolver):
    """Reads the cluster of a SageMaker training job. Every host is a worker.

    `SM_HOSTS` lists the hosts, and `SM_CURRENT_HOST` is the name of this host. As in `tf.distribute`, the
    hosts are numbered in the alphabetical order of their names ("algo-10" comes before "algo-2").

    Args:
        port: The port at which each host listens.
        task_type: Overrides the job of this task, which is "worker".
        task_id: Overrides the index of this task.
        rpc_layer: The protocol of TensorFlow's tasks.
        environment: The value of the property `environment`.
        environ: The environment variables. Defaults to `os.environ`.

    Example:

    >>> from kdist.cluster_resolver import SageMakerClusterResolver
    >>> resolver = SageMakerClusterResolver(
    ...     environ={"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"})
    >>> resolver.task_id, resolver.cluster_spec()
    (1, ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}))
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._port = port
        self._task_type = None if task_type is None else str(task_type)
        self._task_id = None if task_id is None else int(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment  # type: ignore[assignment]  # may be None, as in TensorFlow
        if environ is not None:
            self._environ = environ

    def _hosts(self) -> list[str]:
        text = self._environ.get("SM_HOSTS")
        try:
            hosts = json.loads(text or "null")
        except (ValueError, RecursionError):
            hosts = None
        valid = isinstance(hosts, list) and bool(hosts) and all(isinstance(host, str) for host in hosts)
        require(valid, "`SM_HOSTS` is not a JSON list of host names.", _HINT, SM_HOSTS=text)
        require(len(set(hosts)) == len(hosts), "`SM_HOSTS` contains a host twice.", _HINT, SM_HOSTS=text)
        for host in hosts:
            split_address(join_address(host, int(self._port)), "SM_HOSTS")
        return sorted(hosts)

    def _described(self) -> Task:
        hosts, own = self._hosts(), self._environ.get("SM_CURRENT_HOST")
        received = {"SM_CURRENT_HOST": own, "SM_HOSTS": hosts}
        require(own in hosts, "`SM_CURRENT_HOST` is not in `SM_HOSTS`.", _HINT, **received)
        return Task(task_type="worker", task_id=hosts.index(str(own)))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster in `SM_HOSTS`, with the job "worker".

        Raises:
            ClusterConfigError: If the variable is missing or invalid.
        """
        return ClusterSpec({"worker": [join_address(host, int(self._port)) for host in self._hosts()]})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to this task. With a single host, returns ""."""
        return "" if len(self._hosts()) == 1 else super().master(task_type, task_id, rpc_layer)
