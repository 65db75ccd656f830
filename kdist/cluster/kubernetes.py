"""`KubernetesClusterResolver`, which finds pods by their labels with the Kubernetes API."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.cluster.addresses import join_address
from kdist.cluster.clients import asking, import_client
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterRuntimeError, ClusterTypeError
from kdist.cluster.resolver import ClusterResolver, master_of_task
from kdist.errors import InvalidArgumentError

_TIMEOUT = 10.0  # seconds per attempt; the client makes several attempts
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_EXAMPLE = 'Pass a list, for example:\nKubernetesClusterResolver({"worker": ["job-name=train"]})'


class KubernetesExecutableLocation(enum.Enum):
    """The location of this program, which determines the Kubernetes credentials.

    `WITHIN_CLUSTER` is a pod, which uses its service account. `OFF_CLUSTER` is any other machine, which uses
    the kubeconfig file.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
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
    >>> from kdist.cluster import KubernetesClusterResolver
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

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the given task. Defaults to this task, or to "" if it is unknown."""
        return master_of_task(self, task_type, task_id, rpc_layer)


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
    with asking(
        "Cannot load the kubeconfig file." if off_cluster else "Cannot load the service account of this pod.",
        "Check the file:\nkubectl config view"
        if off_cluster
        else "Outside a pod, pass executable_location=KubernetesExecutableLocation.OFF_CLUSTER.",
    ):
        if off_cluster:
            config.load_kube_config()
        else:
            config.load_incluster_config()
    return client.CoreV1Api()
