"""`GCEClusterResolver`, which lists the machines of a Google Compute Engine instance group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdist.cluster.addresses import join_address
from kdist.cluster.clients import asking, import_client
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterRuntimeError
from kdist.cluster.resolver import ClusterResolver, master_of_task


class GCEClusterResolver(ClusterResolver):
    """Lists the running machines of an instance group with Google's Python client. Each one is a task.

    The API does not identify the machine of this process, so pass `task_id`. As in `tf.distribute`, the tasks
    are numbered in the alphabetical order of their addresses.

    Args:
        project: The name of the project.
        zone: The zone of the instance group.
        instance_group: The name of the instance group.
        port: The port at which every task listens.
        task_type: The job of all machines.
        task_id: The index of this process.
        rpc_layer: The protocol of TensorFlow's tasks.
        credentials: Google credentials, or "default" for the credentials of the machine.
        service: A service from `googleapiclient.discovery.build("compute", "v1")`. Created by default.

    Raises:
        ClusterImportError: If the client package is needed but not installed. It is also an `ImportError`.

    Example:

    ```python
    resolver = kdist.cluster_resolver.GCEClusterResolver("my-project", "us-west1-a", "my-group", 8470, task_id=0)
    strategy = kdist.MultiWorkerMirroredStrategy(resolver)
    ```

    You can pass a custom service. The resolver uses it only in `cluster_spec()`:

    >>> from kdist.cluster import GCEClusterResolver
    >>> GCEClusterResolver("my-project", "us-west1-a", "my-group", 8470, task_id=1, service=object()).task_id
    1
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str | None = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._where = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = _build_service(credentials) if service is None else service

    @property
    def task_type(self) -> str | None:
        """The job of all machines."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ClusterRuntimeError(
            "The task_type of a GCEClusterResolver cannot be changed.",
            received={"task_type": task_type},
            hint="Pass `task_type` to the constructor.",
        )

    def cluster_spec(self) -> ClusterSpec:
        """Requests the running machines from the Compute Engine API.

        Returns:
            A `ClusterSpec` with one job.

        Raises:
            ClusterRuntimeError: If no machine is running, or the request fails. It is also a `RuntimeError`.
        """
        with asking(
            "The Compute Engine API did not list the machines of the instance group.",
            f"Check the group:\ngcloud compute instance-groups list-instances {self._group}",
        ):
            addresses = sorted(join_address(address, self._port) for address in self._machines())
        if not addresses:
            raise ClusterRuntimeError(
                "The instance group has no running machines.",
                received={**self._where, "instance_group": self._group},
                hint=f"Check the group:\ngcloud compute instance-groups list-instances {self._group}",
            )
        return ClusterSpec({str(self._task_type): addresses})

    def _machines(self) -> Iterator[str]:
        groups, machines = self._service.instanceGroups(), self._service.instances()
        request = groups.listInstances(
            **self._where, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        while request is not None:
            page = request.execute()
            for item in page.get("items", ()):
                name = item["instance"].rpartition("/")[2]
                machine = machines.get(**self._where, instance=name).execute()
                yield machine["networkInterfaces"][0]["networkIP"]
            request = groups.listInstances_next(previous_request=request, previous_response=page)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to this task, or to "" if it is unknown."""
        return master_of_task(self, task_type, task_id, rpc_layer)


def _build_service(credentials: Any) -> Any:
    """Creates a client of the Compute Engine API."""
    discovery = import_client("googleapiclient.discovery", "google-api-python-client", "service")
    given = None if credentials == "default" else credentials
    with asking(
        "Cannot create a client of the Compute Engine API.", "Log in:\ngcloud auth application-default login"
    ):
        return discovery.build("compute", "v1", credentials=given, cache_discovery=False)
