"""TPU slices: recorded variables and answers of the metadata server, and the resulting clusters.

Their formats come from torch_xla's tests of its TPU module (the endpoints), and from `tpu-env` as users
printed it on TPU VMs (a v4 pod, and a v6e, whose endpoints are names). JAX's `cloud_tpu_cluster.py` shows
several slices.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import ClusterSpec, discover, survey
from kdist.cluster.tpu_slice import parse_tpu_env
from kdist.cluster_resolver import TPUClusterResolver, UnionResolver
from kdist.errors import ClusterConfigError

ENDPOINTS_V4 = ",".join(
    f"t1v-n-0f996b37-w-{i}:1234{5 + i}:10.130.0.{n}" for i, n in enumerate((26, 27, 25, 28))
)
TPU_ENV_V4 = """ACCELERATOR_TYPE: 'v4-32'
ALT: 'false'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
CONSUMER_PROJECT_ID: 'my-project'
HOST_BOUNDS: '1,1,4'
INJECT_SLICE_BUILDER_FAULT: ''
RUNTIME_VERSION: 'gcr.io/cloud-tpu-v2-images/fake_tensorflow:latest'
TOPOLOGY: '2x2x4'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: '1,1,4'
TPU_TOPOLOGY_WRAP: 'true,true,true'
TYPE: 'V4'
WORKER_ID: '2'
ZONE: 'us-central2-b'
"""
SLICES = "MEGASCALE_COORDINATOR_ADDRESS: '10.130.0.26'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
V2_8 = {
    "agent-worker-number": "0", "accelerator-type": "v2-8", "tpu-env": "ACCELERATOR_TYPE: 'v2-8'\nWORKER_ID: '0'\n",
    "worker-network-endpoints": "t1v-n-ea9d3291-w-0:12345:10.130.0.31",
}  # fmt: skip
V4_32 = {
    "agent-worker-number": "2", "accelerator-type": "v4-32", "tpu-env": TPU_ENV_V4,
    "worker-network-endpoints": ENDPOINTS_V4,
}  # fmt: skip
V6E_1 = {
    "agent-worker-number": "0", "accelerator-type": "v6e-1", "worker-network-endpoints": "instance-20260826-215213",
    "tpu-env": "TPU_WORKER_ID: '0'\nTPU_ACCELERATOR_TYPE: 'v6e-1'\nTOPOLOGY: '1x1'\nCHIPS_PER_HOST_BOUNDS: '1,1,1'\n",
}  # fmt: skip
# A JobSet on GKE, whose webhook sets the variables: the second host of the second of two v5litepod-8 slices.
GKE = {
    "TPU_WORKER_HOSTNAMES": "d-slice-1-0.d,d-slice-1-1.d", "TPU_WORKER_ID": "1", "TPU_TOPOLOGY": "2x4",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_SKIP_MDS_QUERY": "true",
    "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "d-slice-0-0.d:8080",
}  # fmt: skip
COLAB = {
    "TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_ACCELERATOR_TYPE": "v5e-1", "TPU_WORKER_HOSTNAMES": "localhost", "COLAB_TPU_1VM": "1",
}  # fmt: skip


def server_of(attributes, **others):
    """Returns the `fetch` function of a metadata server with these attributes."""
    known = {f"instance/attributes/{name}": text for name, text in attributes.items()} | others
    return known.get


def unreachable(path):
    raise AssertionError(f"the network is asked for {path}")


def told(resolver):
    metadata = resolver.get_tpu_system_metadata()
    return (
        discover(resolver).worker_index,
        metadata.num_hosts,
        metadata.num_cores,
        resolver.num_accelerators(),
        metadata.topology,
    )


def test_one_host():
    resolver = TPUClusterResolver(environ={}, fetch=server_of(V2_8))
    assert told(resolver) == (0, 1, 8, {"TPU": 8}, None)
    assert resolver.cluster_spec() == {} and resolver.master() == ""
    cluster = discover(resolver)
    assert (cluster.is_chief, cluster.num_workers, cluster.coordinator) == (True, 1, None)
    assert told(TPUClusterResolver(environ={}, fetch=server_of(V6E_1))) == (0, 1, 1, {"TPU": 1}, "1x1")
    assert told(TPUClusterResolver(environ=COLAB, fetch=unreachable)) == (0, 1, 1, {"TPU": 1}, None)


@pytest.mark.kills("cluster_tpu_hosts_by_name")
def test_a_pod_of_four_hosts():
    resolver = TPUClusterResolver(environ={}, fetch=server_of(V4_32))
    assert told(resolver) == (2, 4, 16, {"TPU": 4}, "2x2x4")
    # The number of a worker sets the order, not its address: the third host has the lowest address.
    assert resolver.cluster_spec() == {"worker": [f"10.130.0.{n}:8482" for n in (26, 27, 25, 28)]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 2, "10.130.0.26:8482")
    assert resolver.master("worker", 3, "grpc") == "grpc://10.130.0.28:8482"
    chief = TPUClusterResolver(environ={}, fetch=server_of({**V4_32, "agent-worker-number": "0"}))
    assert discover(chief).is_chief and not discover(resolver).is_chief
    names = {**V4_32, "worker-network-endpoints": "t-0,t-1,t-2,t-3"}
    assert TPUClusterResolver(environ={}, fetch=server_of(names)).master() == "t-0:8482"


def test_two_slices_of_the_metadata_server():
    second = {**V4_32, "tpu-env": TPU_ENV_V4 + SLICES}
    resolver = TPUClusterResolver(environ={}, fetch=server_of(second))
    cluster = discover(resolver)
    assert (cluster.worker_index, cluster.num_workers, cluster.coordinator) == (6, 8, "10.130.0.26:8482")
    assert resolver.get_tpu_system_metadata().num_cores == 32
    # Variables that are set by hand override the server's values, as in JAX.
    first = TPUClusterResolver(environ={"MEGASCALE_SLICE_ID": "0"}, fetch=server_of(second))
    assert discover(first).worker_index == 2


def test_two_slices_of_kubernetes():
    cluster = discover(environ=GKE)  # automatically, and without the network
    assert (cluster.source, cluster.worker_index, cluster.num_workers) == ("TPU", 3, 4)
    # A slice has only its own hosts' addresses. A worker with all addresses would skip the exchange.
    assert cluster.addresses == ("d-slice-0-0.d:8482", None, None, None)
    indices = [
        discover(environ={**GKE, "MEGASCALE_SLICE_ID": str(one), "TPU_WORKER_ID": str(host)}).worker_index
        for one in range(2)
        for host in range(2)
    ]
    assert indices == [0, 1, 2, 3]
    chief = {**GKE, "MEGASCALE_SLICE_ID": "0", "TPU_WORKER_ID": "0"}
    assert discover(environ={**chief, "TPU_WORKER_HOSTNAMES": "d-slice-0-0.d,d-slice-0-1.d"}).is_chief
    single = {**GKE, "TPU_WORKER_HOSTNAMES": "d-slice-1-0.d", "TPU_WORKER_ID": "0"}
    assert (discover(environ=single).worker_index, discover(environ=single).num_workers) == (1, 2)


def test_one_host_is_not_a_source():
    assert discover(environ=COLAB).source == "default"
    (report,) = survey(COLAB)
    assert not report.won and "several hosts" in report.why


def test_processes_that_torch_xla_started():
    # As torch_xla's configure_topology sets them for two hosts of four processes: v4-16, worker 1, process 2.
    addresses = ",".join(f"10.130.0.{host}:{port}" for host in (31, 30) for port in range(8476, 8480))
    started = {
        "TPU_PROCESS_ADDRESSES": addresses, "CLOUD_TPU_TASK_ID": "6", "TPU_PROCESS_PORT": "8478",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "2,2,2", "TPU_VISIBLE_CHIPS": "2",
    }  # fmt: skip
    cluster = discover(environ=started)
    assert (cluster.worker_index, cluster.num_workers, cluster.coordinator) == (6, 8, "10.130.0.31:8482")
    assert (cluster.local_rank, cluster.local_workers) == (2, 4) and len(set(cluster.addresses)) == 8
    assert TPUClusterResolver(environ=started).num_accelerators() == {"TPU": 1}
    del started["CLOUD_TPU_TASK_ID"]  # one script per host
    alone = discover(environ={**started, "TPU_WORKER_ID": "1"})
    assert (alone.worker_index, alone.num_workers, alone.local_workers) == (1, 2, 1)


@pytest.mark.parametrize(
    ("kind", "hosts", "devices"),
    [("v2-8", 1, 8), ("v3-32", 4, 8), ("v4-8", 1, 4), ("v5p-16", 2, 4), ("v5litepod-16", 4, 4), ("v5e-8", 1, 8),
     ("v6e-8", 2, 4), ("tpu7x-16", 2, 8), ("v7x-16", 2, 8), ("v99-8", 1, None), ("", 1, None)],
)  # fmt: skip
def test_devices_of_each_type(kind, hosts, devices):
    names = ",".join(f"t-{i}" for i in range(hosts))
    environ = {"TPU_WORKER_HOSTNAMES": names, "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": kind}
    assert TPUClusterResolver(environ=environ).num_accelerators() == ({"TPU": devices} if devices else {})


@pytest.mark.kills("tpu_over_the_network")
def test_a_tpu_over_the_network_is_refused():
    # Otherwise, each host would train by itself, or one process would train without any TPU.
    for tpu in ("grpc://10.240.1.2:8470,10.240.1.3", ["grpc://10.240.1.2"]):
        with pytest.raises(ClusterConfigError, match=r"(?s)over the network.*TPUClusterResolver\(\)"):
            TPUClusterResolver(tpu, environ=GKE, fetch=unreachable)


def test_a_slice_under_other_names():
    job = TPUClusterResolver(
        job_name="tpu_worker",
        coordinator_name="coordinator",
        coordinator_address="10.0.0.1:9",
        environ={},
        fetch=server_of(V4_32),
    )
    assert job.cluster_spec().job_tasks("coordinator") == ["10.0.0.1:9"]
    assert (job.get_job_name(), job.environment) == ("tpu_worker", "")
    assert job.get_coordination_service_leader() == "/job:tpu_worker/task:0"
    assert job.master() == job.get_master() == "10.130.0.26:8482"
    assert UnionResolver(job).cluster_spec().jobs == ["tpu_worker", "coordinator"]
    with job:
        assert job.get_tpu_system_metadata().num_hosts == 4
    local = TPUClusterResolver(
        "local", environ={"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, fetch=unreachable
    )
    assert (
        local.cluster_spec() == ClusterSpec({}) and local.master() == "" and discover(local).num_workers == 1
    )


@pytest.mark.kills("cluster_named_tpu_trains_alone")
def test_a_name_changes_nothing():
    # Other tools often set TPU_NAME on TPU hosts; it must not make each host train by itself.
    for resolver in (
        TPUClusterResolver(environ={"TPU_NAME": "my-pod"}, fetch=server_of(V4_32)),
        TPUClusterResolver("my-pod", environ={}, fetch=server_of(V4_32)),
    ):
        assert (discover(resolver).worker_index, discover(resolver).num_workers) == (2, 4)
    kubernetes = TPUClusterResolver("my-pod", environ=GKE, fetch=unreachable)
    assert discover(kubernetes).worker_index == 3
    assert TPUClusterResolver("local", environ=GKE).num_accelerators() == {"TPU": 4}
    with pytest.raises(ValueError, match="is not a TPU VM"):
        TPUClusterResolver("my-pod", environ={}, fetch=server_of({}))


def test_connect(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    assert TPUClusterResolver.connect().task_id == 1


WRONG = [
    ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID"),
    ({"TPU_WORKER_ID": None}, "TPU_WORKER_ID"),
    ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID"),
    ({"CLOUD_TPU_TASK_ID": "7"}, "CLOUD_TPU_TASK_ID"),
    ({"TPU_WORKER_HOSTNAMES": "a,,b"}, "TPU_WORKER_HOSTNAMES"),
    ({"TPU_WORKER_HOSTNAMES": "a,a"}, "TPU_WORKER_HOSTNAMES"),
    ({"TPU_WORKER_HOSTNAMES": "a b,c"}, "TPU_WORKER_HOSTNAMES"),
    ({"TPU_PROCESS_ADDRESSES": "a:99999,b:1"}, "TPU_PROCESS_ADDRESSES"),
    ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,x"}, "TPU_CHIPS_PER_HOST_BOUNDS"),
    ({"TPU_CHIPS_PER_HOST_BOUNDS": "0,2,1"}, "TPU_CHIPS_PER_HOST_BOUNDS"),
    ({"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES"),
    ({"MEGASCALE_NUM_SLICES": "0"}, "MEGASCALE_NUM_SLICES"),
    ({"MEGASCALE_NUM_SLICES": "99999"}, "MEGASCALE_NUM_SLICES"),
    ({"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID"),
    ({"MEGASCALE_SLICE_ID": None}, "MEGASCALE_SLICE_ID"),
    ({"MEGASCALE_COORDINATOR_ADDRESS": None}, "MEGASCALE_COORDINATOR_ADDRESS"),
    ({"MEGASCALE_COORDINATOR_ADDRESS": "http://a"}, "MEGASCALE_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize(("change", "name"), WRONG, ids=[f"{name}-{i}" for i, (_, name) in enumerate(WRONG)])
def test_a_wrong_variable_is_named(change, name):
    environ = {key: value for key, value in {**GKE, **change}.items() if value is not None}
    with pytest.raises(ClusterConfigError, match=name):
        discover(environ=environ)


def test_no_tpu():
    for attributes in ({}, {"agent-worker-number": "0"}):
        with pytest.raises(ValueError, match="is not a TPU VM"):
            TPUClusterResolver(environ={}, fetch=server_of(attributes))
    with pytest.raises(ValueError, match="worker-network-endpoints"):
        TPUClusterResolver(environ={}, fetch=server_of({**V2_8, "worker-network-endpoints": "a:b"}))
    with pytest.raises(ValueError, match="TPU_WORKER_ID"):
        TPUClusterResolver(environ={}, fetch=server_of({**V4_32, "agent-worker-number": "4"}))
    with pytest.raises(ValueError, match="exactly one TPU"):
        TPUClusterResolver(["a", "b"], environ={})
    with pytest.raises(ValueError, match="without `coordinator_address`"):
        TPUClusterResolver(coordinator_name="coordinator", environ=GKE)


names = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}", fullmatch=True)


@pytest.mark.kills("cluster_slices_not_counted")
@given(st.lists(names, min_size=1, max_size=6, unique=True), st.integers(1, 4), st.data())
def test_workers_are_numbered_slice_by_slice(hosts, num_slices, data):
    slice_id = data.draw(st.integers(0, num_slices - 1))
    host = data.draw(st.integers(0, len(hosts) - 1))
    environ = {"TPU_WORKER_HOSTNAMES": ",".join(hosts), "TPU_WORKER_ID": str(host)}
    if num_slices > 1:
        environ |= {"MEGASCALE_NUM_SLICES": str(num_slices), "MEGASCALE_SLICE_ID": str(slice_id)}
        environ["MEGASCALE_COORDINATOR_ADDRESS"] = "first:9"
    cluster = discover(TPUClusterResolver(environ=environ, fetch=unreachable))
    assert (cluster.worker_index, cluster.num_workers) == (
        slice_id * len(hosts) + host,
        num_slices * len(hosts),
    )
    assert cluster.is_chief == (slice_id == 0 and host == 0)
    if num_slices > 1:
        assert cluster.addresses == ("first:8482", *[None] * (cluster.num_workers - 1))
    elif len(hosts) > 1:
        assert cluster.addresses == tuple(f"{name}:8482" for name in hosts)


values = st.text(st.characters(exclude_characters="\r\n'\":", exclude_categories=("Z", "C")), max_size=10)


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,12}", fullmatch=True), values, max_size=5))
def test_tpu_env_round_trip(pairs):
    assert parse_tpu_env("".join(f"{name}: '{value}'\n" for name, value in pairs.items())) == pairs


@given(st.dictionaries(st.sampled_from([*V4_32]), st.text(max_size=12)))
def test_any_metadata_is_an_error_or_a_cluster(attributes):
    try:
        cluster = discover(TPUClusterResolver(environ={}, fetch=server_of(attributes)))
    except ClusterConfigError:
        return
    assert 0 <= cluster.worker_index < cluster.num_workers == len(cluster.addresses)
