"""Resolvers that list machines with the official clients of cloud APIs: Compute Engine and Kubernetes."""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.cluster.addresses import join_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterImportError, ClusterRuntimeError, ClusterTypeError
from kdist.cluster.resolver import TaskClusterResolver
from kdist.errors import InvalidArgumentError, KdistError

_TIMEOUT = 10.0  # seconds per attempt; the client makes several attempts
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_EXAMPLE = 'Pass a list, for example:\nKubernetesClusterResolver({"worker": ["job-name=train"]})'


def import_client(module: str, package: str, instead: str) -> Any:
    """Imports a module of a client. `package` is its name for `pip install`, and users can pass `instead`.

    Raises:
        ClusterImportError: If the module cannot be imported. It is also an `ImportError`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ClusterImportError(
            f"Cannot import the package {package}, which this resolver needs.",
            received={"module": module, "error": str(error)},
            hint=f"Install it with `pip install {package}`, or pass `{instead}`.",
        ) from error


@contextlib.contextmanager
def asking(problem: str, hint: str) -> Iterator[None]:
    """Converts all errors of a client (no network, no permission, a missing field) into an error of kdist.

    Raises:
        ClusterRuntimeError: If the `with` block fails. It is also a `RuntimeError`.
    """
    try:
        yield
    except KdistError:
        raise
    except Exception as error:
        raise ClusterRuntimeError(
            problem,
            received={"error": f"{type(error).__name__}: {error}"[:500]},
            hint=hint,
        ) from error


class GCEClusterResolver(TaskClusterResolver):
    """Lists the running machines of an instance group with Google's Python client. Each machine is a task.

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

    >>> from kdist.cluster_resolver import GCEClusterResolver
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
        hint = f"Check the group:\ngcloud compute instance-groups list-instances {self._group}"
        with asking("The Compute Engine API did not list the machines of the instance group.", hint):
            addresses = sorted(join_address(address, self._port) for address in self._machines())
        if not addresses:
            raise ClusterRuntimeError(
                "The instance group has no running machines.",
                received={**self._where, "instance_group": self._group},
                hint=hint,
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


def _build_service(credentials: Any) -> Any:
    discovery = import_client("googleapiclient.discovery", "google-api-python-client", "service")
    given = None if credentials == "default" else credentials
    with asking(
        "Cannot create a client of the Compute Engine API.", "Log in:\ngcloud auth application-default login"
    ):
        return discovery.build("compute", "v1", credentials=given, cache_discovery=False)


class KubernetesExecutableLocation(enum.Enum):
    """The location of this program, which determines the Kubernetes credentials.

    `WITHIN_CLUSTER` is a pod, which uses its service account. `OFF_CLUSTER` is any other machine, which uses
    the kubeconfig file.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(TaskClusterResolver):
    """Finds the tasks of each job by the labels of their pods, with the Kubernetes Python client.

    The API does not identify the pod of this process, so set `task_type` and `task_id`. Pods of an Indexed
    Job are ordered by their index, other pods by their name. The addresses are pod addresses, as documented
    by `tf.distribute`. TensorFlow returns node addresses, which are the same with `hostNetwork`.

    Args:
        job_to_label_mapping: A dictionary from job name to a list of label selectors. Defaults to
            `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: The port at which every task listens.
        rpc_layer: The protocol of TensorFlow's tasks.
        override_client: A `kubernetes.client.CoreV1Api` with credentials. Created by default.
        executable_location: The location of this program.
        namespace: The namespace of the pods (`tf.distribute` searches all namespaces). Defaults to the
            namespace of this pod's service account or, off the cluster, of the current context.

    Raises:
        ClusterImportError: If `kubernetes` is needed but not installed. It is also an `ImportError`.
        ClusterRuntimeError: If there are no credentials. It is also a `RuntimeError`.
        InvalidArgumentError: If `executable_location` has the wrong type. It is also a `ValueError`.

    Example:

    ```python
    resolver = kdist.cluster_resolver.KubernetesClusterResolver({"worker": ["job-name=train"]})
    resolver.task_type, resolver.task_id = "worker", int(os.environ["JOB_COMPLETION_INDEX"])
    strategy = kdist.MultiWorkerMirroredStrategy(resolver)
    ```

    You can pass a custom client. The client in this example always returns the same pod:

    >>> from types import SimpleNamespace as Object
    >>> from kdist.cluster_resolver import KubernetesClusterResolver
    >>> pod = Object(metadata=Object(name="train-0", labels={}), status=Object(phase="Running", pod_ip="10.8.0.4"))
    >>> client = Object(list_namespaced_pod=lambda namespace, **_: Object(items=[pod]))
    >>> KubernetesClusterResolver({"worker": ["job-name=train"]}, override_client=client).cluster_spec()
    ClusterSpec({'worker': ['10.8.0.4:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise InvalidArgumentError(
                "`executable_location` is not a KubernetesExecutableLocation.",
                received={"executable_location": executable_location},
                hint="Pass KubernetesExecutableLocation.WITHIN_CLUSTER or KubernetesExecutableLocation.OFF_CLUSTER.",
            )
        self._jobs = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        for job, selectors in self._jobs.items():
            if isinstance(selectors, str):
                raise ClusterTypeError(
                    f"The label selectors of job {job!r} are a string instead of a list.",
                    received={job: selectors},
                    hint=_EXAMPLE,
                )
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        off_cluster = executable_location is KubernetesExecutableLocation.OFF_CLUSTER
        self._client = override_client or _make_client(off_cluster)
        # Users who can start pods in another namespace could give a pod this job's label.
        self._namespace = namespace or _own_namespace(off_cluster and override_client is None)

    def cluster_spec(self) -> ClusterSpec:
        """Requests the pods from the Kubernetes API.

        Returns:
            A `ClusterSpec` with the jobs passed to the constructor.

        Raises:
            ClusterRuntimeError: If a pod is not running, a selector matches no pod, or the request fails. It
                is also a `RuntimeError`.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._addresses(selector)]
                for job, selectors in self._jobs.items()
            }
        )

    def _addresses(self, selector: str) -> list[str]:
        with asking(
            f"The Kubernetes API did not list the pods of {selector!r}.",
            "Check that the service account may list pods:\n"
            f"kubectl auth can-i list pods -n {self._namespace}",
        ):
            found = self._client.list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=_TIMEOUT
            )
            pods = [
                (_completion_index(pod), pod.metadata.name, pod.status.phase, pod.status.pod_ip)
                for pod in found.items
            ]
        if not pods:
            raise ClusterRuntimeError(
                f"The label selector {selector!r} does not match any pod.",
                received={"selector": selector, "namespace": self._namespace},
                hint=f"Check the selector:\nkubectl get pods -n {self._namespace} --selector {selector}",
            )
        for _, name, phase, address in sorted(pods):
            if phase != "Running" or not address:
                raise ClusterRuntimeError(
                    f"Pod {name!r} is not running, or has no address.",
                    received={"selector": selector, "phase": phase, "address": address},
                    hint=f"Read its events:\nkubectl describe pod {name} -n {self._namespace}",
                )
        return [join_address(address, self._port) for _, _, _, address in sorted(pods)]


def _completion_index(pod: Any) -> int:
    """Returns the index in an Indexed Job, because names sort differently (train-10-x before train-2-y)."""
    labels = pod.metadata.labels
    index = labels.get(_COMPLETION_INDEX, "") if isinstance(labels, Mapping) else ""
    return int(index) if index.isdigit() else -1


def _own_namespace(off_cluster: bool) -> str:
    if off_cluster:
        config = import_client("kubernetes.config", "kubernetes", "override_client")
        with asking(
            "Cannot read the namespace from the kubeconfig file.",
            'Pass the namespace, for example: namespace="default"',
        ):
            return str(config.list_kube_config_contexts()[1]["context"].get("namespace") or "default")
    try:
        with open(_NAMESPACE_FILE, encoding="utf-8") as file:
            return file.read(300).strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"  # like kubectl


def _make_client(off_cluster: bool) -> Any:
    config = import_client("kubernetes.config", "kubernetes", "override_client")
    client = import_client("kubernetes.client", "kubernetes", "override_client")
    if off_cluster:
        with asking("Cannot load the kubeconfig file.", "Check the file:\nkubectl config view"):
            config.load_kube_config()
    else:
        with asking(
            "Cannot load the service account of this pod.",
            "Outside a pod, pass executable_location=KubernetesExecutableLocation.OFF_CLUSTER.",
        ):
            config.load_incluster_config()
    return client.CoreV1Api()
