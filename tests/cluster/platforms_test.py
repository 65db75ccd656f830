"""The variables that Kubernetes, Kubeflow, Ray and SageMaker set for a worker, and their precedence.

They follow the sources of the controllers: `envvar.go` of each job of training-operator, its `elastic.go`,
`torch.go` and `jax.go` of Trainer, and `train/torch/config.py` of Ray. SageMaker documents its variables.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import discover, survey
from kdist.cluster.sources import SOURCES
from kdist.cluster_resolver import (
    IndexedJobClusterResolver,
    JAXClusterResolver,
    PETClusterResolver,
    SageMakerClusterResolver,
)
from kdist.errors import ClusterConfigError
from tests.cluster import discovery_test, schedulers_test
from tests.cluster.schedulers_test import without

INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "KDIST_NUM_WORKERS": "4",
    "KDIST_COORDINATOR_ADDRESS": "train-0.train:2222",
}
# The second of three workers beside a master.
PYTORCH_JOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "digits-master-0",
    "PET_MASTER_ADDR": "digits-master-0", "WORLD_SIZE": "4", "RANK": "2", "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2", "PET_NNODES": "4",
}  # fmt: skip
ELASTIC = {
    "PET_RDZV_ENDPOINT": "digits-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:4",
    "PET_MAX_RESTARTS": "10",
}  # fmt: skip
JAX_JOB = {
    "PYTHONUNBUFFERED": "1", "COORDINATOR_PORT": "6666", "COORDINATOR_ADDRESS": "digits-worker-0",
    "NUM_PROCESSES": "3", "PROCESS_ID": "1",
}  # fmt: skip
TRAINER_TORCH = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1",
}  # fmt: skip
TRAINER_JAX = {
    "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "digits-node-0-0.digits:29400",
    "JAX_COORDINATOR_PORT": "29400", "JAX_DISTRIBUTED_BACKEND": "gloo", "JOB_COMPLETION_INDEX": "2",
}  # fmt: skip
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}  # fmt: skip
RAY_TORCH = {
    "RAY_RAYLET_PID": "12", "RAY_JOB_ID": "01000000", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "41873", "RANK": "1",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "NODE_RANK": "0", "ACCELERATE_TORCH_DEVICE": "cpu",
}  # fmt: skip
# The environment; its source, index, number of workers, and address of worker 0.
PLATFORMS = {
    "indexed job": (INDEXED_JOB, ("Indexed Job", 2, 4, "train-0.train:2222")),
    "PyTorchJob": (PYTORCH_JOB, ("torchrun", 2, 4, "digits-master-0:23456")),
    "JAXJob": (JAX_JOB, ("JAX", 1, 3, "digits-worker-0:6666")),
    "Trainer, torch": (TRAINER_TORCH, ("PET", 1, 2, "digits-node-0-0.digits:29400")),
    "Trainer, jax": (TRAINER_JAX, ("JAX", 2, 3, "digits-node-0-0.digits:29400")),
    "SageMaker": (SAGEMAKER, ("SageMaker", 1, 2, "algo-1:2223")),
    **schedulers_test.PLATFORMS,
    "Ray": (RAY_TORCH, ("torchrun", 1, 4, "10.0.0.1:41873")),
}


@pytest.mark.kills(
    cluster_flux_tasks_are_those_of_slurm="[Flux]", cluster_lsf_launch_node_is_worker_0="[LSF]"
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_platform_sets_is_its_cluster(platform):
    variables, expected = PLATFORMS[platform]
    cluster = discover(environ=variables)
    assert (cluster.source, cluster.worker_index, cluster.num_workers, cluster.coordinator) == expected
    (won,) = (report for report in survey(variables) if report.won)
    assert won.source == expected[0] and won.says.endswith(f"of {expected[2]}")


def test_tf_job():
    # As training-operator's tensorflow.go writes it; the evaluator is not part of the cluster.
    cluster = {
        "chief": ["d-chief-0.ns.svc:2222"],
        "worker": ["d-worker-0.ns.svc:2222", "d-worker-1.ns.svc:2222"],
    }
    found = {}
    for kind, index in (("chief", 0), ("worker", 1), ("evaluator", 0)):
        task = {"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"}
        one = discover(environ={"TF_CONFIG": json.dumps(task)})
        found[kind] = one.worker_index, one.num_workers
    assert found == {"chief": (0, 3), "worker": (2, 3), "evaluator": (0, 1)}
    with_servers = {**cluster, "ps": ["d-ps-0.ns.svc:2222"]}
    task = {"cluster": with_servers, "task": {"type": "ps", "index": 0}}
    with pytest.raises(ClusterConfigError, match="parameter server"):
        discover(environ={"TF_CONFIG": json.dumps(task)})


@pytest.mark.kills("cluster_waits_for_processes_nobody_started")
def test_several_processes_a_pod_that_nobody_started():
    # 4 pods of 8 processes: WORLD_SIZE counts processes, but RANK counts pods. Only torchrun starts 8 per pod.
    eight = {**PYTORCH_JOB, "WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8"}
    alone = discover(environ=eight)
    assert (alone.source, alone.worker_index, alone.num_workers) == ("PET", 2, 4)
    assert alone.coordinator == "digits-master-0:23456"
    assert "torchrun would start" in next(r.why for r in survey(eight) if r.source == "torchrun")
    older = without(eight, "PET_MASTER_ADDR", "PET_MASTER_PORT")
    assert discover(environ=older).coordinator == "digits-master-0:23456"
    started = {**eight, "RANK": "19", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert discover(environ=started).worker_index == 19
    first = {**started, "RANK": "2", "LOCAL_RANK": "2"}  # its rank happens to equal the number of its pod
    assert (discover(environ=first).source, discover(environ=first).num_workers) == ("torchrun", 32)


def test_an_elastic_job_needs_torchrun():
    with pytest.raises(ClusterConfigError, match=r"(?s)range.*PET_NNODES='1:4'.*torchrun train.py"):
        discover(environ=ELASTIC)
    with pytest.raises(ClusterConfigError, match=r"(?s)PET_NODE_RANK.*torchrun train.py"):
        discover(environ={**ELASTIC, "PET_NNODES": "4"})
    assert discover(environ={**ELASTIC, "PET_NNODES": "1:1"}).num_workers == 1
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    assert discover(environ={**ELASTIC, **started}).source == "torchrun"


def test_the_process_group_of_ray_has_the_port():
    assert discover(environ=RAY_TORCH).coordinator_taken
    by_hand = without(RAY_TORCH, "ACCELERATE_TORCH_DEVICE")
    assert not discover(environ=by_hand).coordinator_taken


def test_order_of_the_sources():
    assert [source.name for source in SOURCES] == [
        "TF_CONFIG", "torchrun", "Flux", "LSF", "Slurm", "MPI", "KERAS_DISTRIBUTION", "Indexed Job", "JAX", "PET",
        "LeaderWorkerSet", "SageMaker", "Vertex AI", "TPU",
    ]  # fmt: skip
    names = [name for source in SOURCES for name in source.variables]
    assert len(names) == len(set(names))  # each variable is listed once


def test_what_is_nearest_to_the_process_wins():
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "80",
    }
    tf_config = {
        "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    }
    tpu = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}
    for nearest, around in (
        (("MPI", mpi), SAGEMAKER),  # SageMaker's MPI launcher
        (("TF_CONFIG", tf_config), INDEXED_JOB),  # kdist run in a pod
        (
            ("torchrun", without(RAY_TORCH, "RAY_RAYLET_PID")),
            INDEXED_JOB | TRAINER_TORCH,
        ),  # torchrun in a pod
        (("Indexed Job", INDEXED_JOB), TRAINER_JAX | tpu),
        (("JAX", TRAINER_JAX), tpu),  # GKE
        (("SageMaker", SAGEMAKER), tpu),
    ):
        source, variables = nearest
        everything = {**around, **variables}
        assert discover(environ=everything).source == source
        disagreeing = {r.source: r for r in survey(everything)}
        assert disagreeing[source].won
        assert all(r.says for r in disagreeing.values()) and len(disagreeing) > 1


@pytest.mark.kills("cluster_numbered_pods_are_workers")
def test_numbered_pods_alone_are_no_cluster():
    for variables in ({"JOB_COMPLETION_INDEX": "3"}, without(INDEXED_JOB, "KDIST_NUM_WORKERS")):
        assert discover(environ=variables).num_workers == 1
        (report,) = survey(variables)
        assert not report.won and "KDIST_NUM_WORKERS" in report.why


def test_common_names_alone_are_no_cluster():
    for name in (
        "PROCESS_ID",
        "NUM_PROCESSES",
        "COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_ADDRESS",
        "SM_CURRENT_HOST",
    ):
        assert discover(environ={name: "1"}).source == "default"
        assert not any(report.won for report in survey({name: "1"}))


def test_the_address_of_jax_beside_a_jaxjob():
    address = {"JAX_COORDINATOR_ADDRESS": "elsewhere:1"}
    assert discover(environ={**JAX_JOB, **address}).coordinator == "digits-worker-0:6666"
    assert discover(environ={**JAX_JOB, **TRAINER_JAX}).worker_index == 2


def test_one_worker_needs_no_address():
    for variables in (
        {"JOB_COMPLETION_INDEX": "0", "KDIST_NUM_WORKERS": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    ):
        cluster = discover(environ=variables)
        assert (cluster.num_workers, cluster.coordinator) == (1, None) and cluster.source != "default"


def test_sagemaker():
    ten = {"SM_HOSTS": json.dumps([f"algo-{i}" for i in range(1, 11)]), "SM_CURRENT_HOST": "algo-2"}
    resolver = SageMakerClusterResolver(port=80, environ=ten)
    assert resolver.cluster_spec().job_tasks("worker")[:3] == ["algo-1:80", "algo-10:80", "algo-2:80"]
    assert (resolver.task_id, resolver.master(), resolver.environment) == (2, "algo-2:80", None)
    assert resolver.master("worker", 1, "grpc") == "grpc://algo-10:80"
    assert SageMakerClusterResolver(task_id=4, environ=ten).task_id == 4
    assert SageMakerClusterResolver(environ={"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"}).master() == ""
    assert [discover(environ={**ten, "SM_CURRENT_HOST": f"algo-{i}"}).local_rank for i in (1, 2)] == [0, 0]


WRONG = [
    *discovery_test.WRONG,
    *schedulers_test.WRONG,
    (INDEXED_JOB, {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX"),
    (INDEXED_JOB, {"JOB_COMPLETION_INDEX": None}, "completionMode: Indexed"),
    (INDEXED_JOB, {"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX"),
    (INDEXED_JOB, {"KDIST_NUM_WORKERS": "0"}, "KDIST_NUM_WORKERS"),
    (INDEXED_JOB, {"KDIST_NUM_WORKERS": "four"}, "KDIST_NUM_WORKERS"),
    (INDEXED_JOB, {"KDIST_NUM_WORKERS": "999999999"}, "KDIST_NUM_WORKERS"),
    (INDEXED_JOB, {"KDIST_COORDINATOR_ADDRESS": None}, "KDIST_COORDINATOR_ADDRESS"),
    (INDEXED_JOB, {"KDIST_COORDINATOR_ADDRESS": "train-0.train"}, "KDIST_COORDINATOR_ADDRESS"),
    (INDEXED_JOB, {"KDIST_COORDINATOR_ADDRESS": "http://train-0:80"}, "KDIST_COORDINATOR_ADDRESS"),
    (JAX_JOB, {"PROCESS_ID": "3"}, "PROCESS_ID"),
    (JAX_JOB, {"PROCESS_ID": None}, "PROCESS_ID"),
    (JAX_JOB, {"NUM_PROCESSES": None}, "NUM_PROCESSES"),
    (JAX_JOB, {"COORDINATOR_ADDRESS": None}, "COORDINATOR_ADDRESS"),
    (JAX_JOB, {"COORDINATOR_PORT": None}, "COORDINATOR_PORT"),
    (JAX_JOB, {"COORDINATOR_ADDRESS": "a b"}, "COORDINATOR_ADDRESS"),
    (TRAINER_JAX, {"JAX_COORDINATOR_ADDRESS": "h:0"}, "JAX_COORDINATOR_ADDRESS"),
    (TRAINER_JAX, {"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID"),
    (TRAINER_TORCH, {"PET_NODE_RANK": "2"}, "PET_NODE_RANK"),
    (TRAINER_TORCH, {"PET_NODE_RANK": None}, "PET_NODE_RANK"),
    (TRAINER_TORCH, {"PET_NNODES": "0"}, "PET_NNODES"),
    (TRAINER_TORCH, {"PET_NNODES": ":"}, "PET_NNODES"),
    (TRAINER_TORCH, {"PET_MASTER_ADDR": None}, "MASTER_ADDR"),
    (TRAINER_TORCH, {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT"),
    (SAGEMAKER, {"SM_CURRENT_HOST": None}, "SM_CURRENT_HOST"),
    (SAGEMAKER, {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST"),
    (SAGEMAKER, {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS"),
    (SAGEMAKER, {"SM_HOSTS": "[]"}, "SM_HOSTS"),
    (SAGEMAKER, {"SM_HOSTS": '["algo-2", 2]'}, "SM_HOSTS"),
    (SAGEMAKER, {"SM_HOSTS": '["algo-2", "algo-2"]'}, "SM_HOSTS"),
    (SAGEMAKER, {"SM_HOSTS": '["algo-2", "a b"]'}, "SM_HOSTS"),
    (SAGEMAKER, {"SM_HOSTS": "[" * 100_000}, "SM_HOSTS"),
]


@pytest.mark.kills("cluster_port_not_checked")
@pytest.mark.parametrize(
    ("good", "change", "name"), WRONG, ids=[f"{name}-{number}" for number, (_, _, name) in enumerate(WRONG)]
)
def test_a_wrong_variable_is_named(good, change, name):
    environ = {key: value for key, value in {**good, **change}.items() if value is not None}
    with pytest.raises(ClusterConfigError, match=name):
        discover(environ=environ)
    assert any(report.says.startswith("invalid: ") for report in survey(environ))


hosts = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True)
ports = st.integers(1, 65535)


@given(st.integers(2, 9999), st.data(), hosts, ports)
def test_numbers_and_addresses_are_read_as_written(count, data, host, port):
    index = data.draw(st.integers(0, count - 1))
    for resolver in (
        IndexedJobClusterResolver(environ={
            "JOB_COMPLETION_INDEX": str(index), "KDIST_NUM_WORKERS": str(count),
            "KDIST_COORDINATOR_ADDRESS": f"{host}:{port}"}),
        JAXClusterResolver(environ={
            "JAX_PROCESS_ID": str(index), "JAX_NUM_PROCESSES": str(count), "JAX_COORDINATOR_ADDRESS": host,
            "JAX_COORDINATOR_PORT": str(port)}),
        PETClusterResolver(environ={
            "PET_NODE_RANK": str(index), "PET_NNODES": f"{count}:{count}", "PET_MASTER_ADDR": host,
            "PET_MASTER_PORT": str(port)}),
    ):  # fmt: skip
        cluster = discover(resolver)
        assert (cluster.worker_index, cluster.num_workers, cluster.coordinator) == (
            index,
            count,
            f"{host}:{port}",
        )
        assert (cluster.local_rank, cluster.local_workers, cluster.is_chief) == (0, 1, index == 0)


@given(st.lists(hosts, min_size=1, max_size=5, unique=True), st.data())
def test_sagemaker_s_hosts_agree_on_their_numbers(names, data):
    shuffled = data.draw(st.permutations(names))
    seen = [
        discover(environ={"SM_HOSTS": json.dumps(listed), "SM_CURRENT_HOST": host}).worker_index
        for host in sorted(names)
        for listed in (names, shuffled)
    ]
    assert seen == [index for index in range(len(names)) for _ in range(2)]


texts = st.sampled_from(
    ["", "0", "1", "2", "-1", "x", "h", "h:1", "[::1]:1", "1:4", "[]", '["h"]', "99999999999", " 1 "]
)
every_name = sorted({name for variables, _ in PLATFORMS.values() for name in variables})


@given(st.dictionaries(st.sampled_from(every_name), texts | st.text(max_size=8)))
def test_any_environment_is_an_error_or_a_cluster(environ):
    survey(environ)
    try:
        cluster = discover(environ=environ)
    except ClusterConfigError:
        return
    assert 0 <= cluster.worker_index < cluster.num_workers == len(cluster.addresses)
