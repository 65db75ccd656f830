"""The resolvers for Kubernetes and Compute Engine, against recorded answers of their APIs.

The fields, names and pages of the answers, and the accepted arguments, follow the references of the two APIs:
`CoreV1Api.list_namespaced_pod`, `instanceGroups.listInstances` and `instances.get`. The official clients
(kubernetes 37, google-api-python-client 2.202) were tried by hand with the same answers from a server.
"""

import sys
import types
from types import SimpleNamespace as Object

import pytest

from kdist.cluster import cloud, discover
from kdist.cluster_resolver import GCEClusterResolver, KubernetesClusterResolver, KubernetesExecutableLocation
from kdist.errors import ClusterConfigError, InvalidArgumentError


def pod(name, ip, phase="Running", index=None):
    labels = {"job-name": "train"} | (
        {"batch.kubernetes.io/job-completion-index": str(index)} if index else {}
    )
    return Object(
        metadata=Object(name=name, labels=labels), status=Object(phase=phase, pod_ip=ip, host_ip="10.0.0.1")
    )


class CoreV1Api:
    """Answers by label selector, like Kubernetes."""

    def __init__(self, pods):
        self.pods = pods
        self.timeouts = []
        self.namespaces = []

    def list_namespaced_pod(self, namespace, *, label_selector, _request_timeout):
        self.timeouts.append(_request_timeout)
        self.namespaces.append(namespace)
        return Object(items=self.pods.get(label_selector, []))


TRAIN = [pod("train-1-xyz", "10.8.0.6"), pod("train-0-abc", "10.8.0.7")]


def test_pods_of_each_job():
    client = CoreV1Api(
        {"job-name=train": TRAIN, "job-name=more": [pod("more-0", "fd00::5")], "ps": [pod("p", "10.1.1.1")]}
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=train", "job-name=more"], "ps": ["ps"]},
        tf_server_port=2222,
        override_client=client,
    )
    assert resolver.cluster_spec() == {
        "worker": ["10.8.0.7:2222", "10.8.0.6:2222", "[fd00::5]:2222"],
        "ps": ["10.1.1.1:2222"],
    }
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.8.0.6:2222"
    assert resolver.master("ps", 0, "http") == "http://10.1.1.1:2222"
    cluster = discover(resolver)
    assert (cluster.worker_index, cluster.num_workers, cluster.coordinator) == (1, 3, "10.8.0.7:2222")
    assert all(0 < timeout <= 60 for timeout in client.timeouts)
    client.pods["job-name=train"] = TRAIN[:1]
    assert resolver.cluster_spec().num_tasks("worker") == 2  # the resolver asks again each time


@pytest.mark.kills("cluster_pods_by_name")
def test_pods_of_an_indexed_job_are_in_its_order():
    twelve = [pod(f"train-{index}-x", f"10.8.0.{index}", index=str(index)) for index in range(12)]
    client = CoreV1Api({"job-name=tensorflow": twelve[::-1]})
    found = KubernetesClusterResolver(override_client=client).cluster_spec().job_tasks("worker")
    assert found == [f"10.8.0.{index}:8470" for index in range(12)]


@pytest.mark.kills("cluster_pods_that_do_not_run")
@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([], r"(?s)not match any pod.*kubectl get pods.*job-name=tensorflow"),
        (
            [pod("a", "10.8.0.1", "Pending")],
            r"(?s)Pod 'a' is not running.*phase='Pending'.*kubectl describe pod a",
        ),
        ([pod("a", None)], "Pod 'a' is not running"),
        ([Object(metadata=Object(name="a", labels=None), status=None)], "Kubernetes API did not list"),
    ],
)
def test_pods_that_do_not_run(pods, message):
    resolver = KubernetesClusterResolver(override_client=CoreV1Api({"job-name=tensorflow": pods}))
    for error in (RuntimeError, ClusterConfigError):
        with pytest.raises(error, match=message):
            resolver.cluster_spec()


def test_kubernetes_refuses_or_does_not_answer():
    class Refuses:
        def list_namespaced_pod(self, namespace, **_):
            raise ConnectionError("(403) Forbidden: pods is forbidden")

    with pytest.raises(RuntimeError, match=r"(?s)Forbidden.*kubectl auth can-i list pods -n default"):
        KubernetesClusterResolver(override_client=Refuses()).cluster_spec()


def test_kubernetes_arguments():
    with pytest.raises(TypeError, match="label selectors of job 'worker' are a string"):
        KubernetesClusterResolver({"worker": "job-name=train"}, override_client=CoreV1Api({}))
    with pytest.raises(InvalidArgumentError, match="KubernetesExecutableLocation"):
        KubernetesClusterResolver(executable_location="pod")
    with pytest.raises(ImportError, match=r"pip install kubernetes.*override_client"):
        KubernetesClusterResolver()


def test_whose_credentials_are_read(monkeypatch):
    read = []

    def outside():
        raise FileNotFoundError("Service host/port is not set.")

    config = types.ModuleType("kubernetes.config")
    config.load_kube_config, config.load_incluster_config = lambda: read.append("file"), outside
    config.list_kube_config_contexts = lambda: ([], {"name": "here", "context": {"namespace": "of-context"}})
    client = types.ModuleType("kubernetes.client")
    api = CoreV1Api({"job-name=tensorflow": TRAIN})
    client.CoreV1Api = lambda: api
    for name, module in (
        ("kubernetes", types.ModuleType("kubernetes")),
        (config.__name__, config),
        (client.__name__, client),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    resolver = KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
    assert resolver.cluster_spec().num_tasks("worker") == 2 and read == ["file"]
    with pytest.raises(RuntimeError, match=r"(?s)not set.*OFF_CLUSTER"):
        KubernetesClusterResolver()
    config.load_incluster_config = lambda: read.append("service account")
    KubernetesClusterResolver().cluster_spec()
    assert read == ["file", "service account"]
    assert api.namespaces == ["of-context", "default"]


@pytest.mark.kills("cluster_pods_of_another_namespace")
def test_only_the_own_namespace_is_asked(tmp_path, monkeypatch):
    # A pod of another tenant with the same label must not become a worker.
    api = CoreV1Api({"job-name=tensorflow": TRAIN})
    (tmp_path / "namespace").write_text("team-a")
    monkeypatch.setattr(cloud, "_NAMESPACE_FILE", str(tmp_path / "namespace"))
    KubernetesClusterResolver(override_client=api).cluster_spec()
    KubernetesClusterResolver(override_client=api, namespace="team-b").cluster_spec()
    assert api.namespaces == ["team-a", "team-b"]


class Compute:
    """A fake service of Compute Engine: the pages of an instance group, and its machines."""

    prefix = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/"

    def __init__(self, pages):
        self.pages = pages
        self.asked = []

    def instanceGroups(self):
        return self

    instances = instanceGroups

    def listInstances(self, *, project, zone, instanceGroup, body):
        self.asked.append((project, zone, instanceGroup, body))
        return self._page(0)

    def listInstances_next(self, *, previous_request, previous_response):
        return self._page(previous_request.number + 1) if "nextPageToken" in previous_response else None

    def _page(self, number):
        items = [{"instance": self.prefix + name, "status": "RUNNING"} for name in self.pages[number]]
        page = {"kind": "compute#instanceGroupsListInstances"} | ({"items": items} if items else {})
        if number + 1 < len(self.pages):
            page["nextPageToken"] = "more"
        return Object(execute=lambda: page, number=number)

    def get(self, *, project, zone, instance):
        address = f"10.128.0.{int(instance.rpartition('-')[2])}"
        return Object(execute=lambda: {"name": instance, "networkInterfaces": [{"networkIP": address}]})


def test_machines_of_an_instance_group():
    service = Compute([["g-4", "g-3"], ["g-12"]])
    resolver = GCEClusterResolver("p", "z", "g", 2222, task_id=1, service=service)
    assert resolver.cluster_spec() == {"worker": ["10.128.0.12:2222", "10.128.0.3:2222", "10.128.0.4:2222"]}
    assert service.asked == [("p", "z", "g", {"instanceState": "RUNNING"})]
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://10.128.0.3:2222"
    assert resolver.master("worker", 2, "http") == "http://10.128.0.4:2222"
    resolver.task_id, resolver.rpc_layer = 2, None
    assert resolver.master() == "10.128.0.4:2222"
    assert discover(resolver).worker_index == 2
    with pytest.raises(RuntimeError, match="cannot be changed"):
        resolver.task_type = "ps"


def test_no_machines_no_answer_and_no_client():
    with pytest.raises(
        RuntimeError, match=r"(?s)no running machines.*gcloud compute instance-groups list-instances g"
    ):
        GCEClusterResolver("p", "z", "g", 1, service=Compute([[]])).cluster_spec()
    with pytest.raises(RuntimeError, match="Compute Engine API did not list"):
        GCEClusterResolver("p", "z", "g", 1, service=object()).cluster_spec()
    with pytest.raises(ImportError, match=r"pip install google-api-python-client.*service"):
        GCEClusterResolver("p", "z", "g", 1)


def test_whose_credentials_google_gets(monkeypatch):
    built = []

    def build(name, version, **options):
        built.append((name, version, options))
        return Compute([["g-1"]])

    discovery = types.ModuleType("googleapiclient.discovery")
    discovery.build = build
    monkeypatch.setitem(sys.modules, "googleapiclient", types.ModuleType("googleapiclient"))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    GCEClusterResolver("p", "z", "g", 1).cluster_spec()
    GCEClusterResolver("p", "z", "g", 1, credentials="mine")
    assert [(name, version, options["credentials"]) for name, version, options in built] == [
        ("compute", "v1", None),
        ("compute", "v1", "mine"),
    ]
