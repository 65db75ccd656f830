"""The order of the sources, and the clusters that torchrun, MPI and Keras describe."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import ClusterResolver, ClusterSpec, SimpleClusterResolver, discover, survey
from kdist.cluster_resolver import KerasClusterResolver, MPIClusterResolver, TorchrunClusterResolver
from kdist.errors import ClusterConfigError

TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "5",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "h:1",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "5",
    "KERAS_DISTRIBUTION_PROCESS_ID": "4",
}
IN_ORDER = [("TF_CONFIG", TF_CONFIG), ("torchrun", TORCHRUN), ("Slurm", SLURM), ("MPI", OPEN_MPI),
            ("KERAS_DISTRIBUTION", KERAS)]  # fmt: skip
# Used in platforms_test.py.
WRONG = [
    (TORCHRUN, {"RANK": "3"}, "RANK"),
    (TORCHRUN, {"RANK": "-1"}, "RANK"),
    (TORCHRUN, {"RANK": "x"}, "RANK"),
    (TORCHRUN, {"RANK": None}, "RANK"),
    (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
    (TORCHRUN, {"WORLD_SIZE": "two"}, "WORLD_SIZE"),
    (TORCHRUN, {"WORLD_SIZE": "999999999"}, "WORLD_SIZE"),
    (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE"),
    (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR"),
    (TORCHRUN, {"MASTER_ADDR": " "}, "MASTER_ADDR"),
    (TORCHRUN, {"MASTER_ADDR": "a b"}, "MASTER_ADDR"),
    (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT"),
    (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT"),
    (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT"),
    (TORCHRUN, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
    (TORCHRUN, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
    (PMI, {"PMI_RANK": "2"}, "PMI_RANK"),
    (PMI, {"PMI_RANK": "x"}, "PMI_RANK"),
    (PMI, {"PMI_SIZE": ""}, "PMI_SIZE"),
    (PMI, {"MPI_LOCALRANKID": "7"}, "MPI_LOCALRANKID"),
    (PMI, {"MASTER_PORT": "70000"}, "MASTER_PORT"),  # with the default host
    (KERAS, {"KERAS_DISTRIBUTION_PROCESS_ID": "5"}, "PROCESS_ID"),
    (KERAS, {"KERAS_DISTRIBUTION_PROCESS_ID": None}, "PROCESS_ID"),
    (KERAS, {"KERAS_DISTRIBUTION_NUM_PROCESSES": "x"}, "NUM_PROCESSES"),
    (KERAS, {"KERAS_DISTRIBUTION_NUM_PROCESSES": None}, "NUM_PROCESSES"),
    (KERAS, {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "h"}, "JOB_ADDRESSES"),
    (KERAS, {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "h:1,"}, "JOB_ADDRESSES"),
    (KERAS, {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "h:1,i:1"}, "JOB_ADDRESSES"),
    (KERAS, {"KERAS_DISTRIBUTION_JOB_ADDRESSES": None}, "JOB_ADDRESSES"),
]


def test_order_of_the_sources():
    everything = {name: value for _, variables in reversed(IN_ORDER) for name, value in variables.items()}
    for position, (source, _) in enumerate(IN_ORDER):
        left = {}
        for _, variables in IN_ORDER[position:]:
            left |= {name: everything[name] for name in variables}
        if position < 3:
            left.pop("MASTER_ADDR", None) if source == "Slurm" else None
        assert discover(environ=left).source == source
        reports = survey(left)
        assert [report.source for report in reports if report.won] == [source]
    assert discover(environ={}).source == "default"
    assert survey({}) == []


def test_explicit_resolver_wins():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["x:1", "y:1"]}), task_type="worker", task_id=0)
    cluster = discover(resolver, environ=TF_CONFIG)
    assert (cluster.source, cluster.addresses, cluster.resolver) == (
        "SimpleClusterResolver",
        ("x:1", "y:1"),
        resolver,
    )


def test_foreign_resolver():
    class Foreign:  # like the resolvers of tf.distribute, it has its task only after cluster_spec()
        task_type = task_id = None

        def cluster_spec(self):
            self.task_type, self.task_id = "worker", 1
            return ClusterSpec({"worker": ["x:1", "y:1"]})

    assert discover(Foreign()).worker_index == 1


def test_explicit_resolver_of_nothing():
    cluster = discover(SimpleClusterResolver(ClusterSpec({})))
    assert (cluster.num_workers, cluster.worker_index, cluster.is_chief) == (1, 0, True)
    with pytest.raises(ClusterConfigError, match="task index of this process is missing"):
        discover(SimpleClusterResolver(ClusterSpec({"worker": ["x:1", "y:1"]})))


def test_abstract():
    with pytest.raises(TypeError):
        ClusterResolver()


def test_torchrun():
    cluster = discover(environ={**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (cluster.num_workers, cluster.worker_index, cluster.coordinator) == (3, 1, "h:29500")
    assert cluster.addresses == ("h:29500", None, None)
    assert (cluster.local_rank, cluster.local_workers) == (1, 2)
    assert cluster.worker_names == ("worker 0 (h:29500)", "worker 1", "worker 2")
    assert not cluster.coordinator_taken
    agent = discover(environ={**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.coordinator_taken
    resolver = TorchrunClusterResolver(environ=TORCHRUN)
    assert resolver.cluster_spec() == {"worker": ["h:29500"]}
    resolver.task_id = 2
    assert discover(resolver).worker_index == 2
    single = discover(environ={"RANK": "0", "WORLD_SIZE": "1"})
    assert (single.source, single.num_workers, single.coordinator) == ("torchrun", 1, None)


def test_a_lonely_rank_is_not_torchrun():
    assert discover(environ={"RANK": "3"}).source == "default"
    assert [report.won for report in survey({"RANK": "3"})] == [False]


def test_open_mpi():
    cluster = discover(environ=dict(OPEN_MPI.items()))
    assert (cluster.source, cluster.worker_index, cluster.num_workers) == ("MPI", 3, 4)
    assert (cluster.local_rank, cluster.local_workers, cluster.coordinator) == (1, 2, "h:5")


def test_mpi_on_one_machine_derives_a_port_from_the_job():
    first, again, other = (
        discover(environ={**PMI, "PMIX_NAMESPACE": job}).coordinator for job in ("job-1", "job-1", "job-2")
    )
    assert first == again != other
    assert first.startswith("127.0.0.1:")


def test_mpi_on_several_machines_needs_an_address():
    spread = {**PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(ClusterConfigError, match="address of rank 0 is unknown"):
        discover(environ=spread)
    told = discover(environ={**spread, "MASTER_ADDR": "h", "MASTER_PORT": "7"})
    assert told.coordinator == "h:7"
    four = {k: v for k, v in OPEN_MPI.items() if not k.startswith("MASTER")}
    uri = {"OMPI_MCA_orte_hnp_uri": "1234.0;tcp://10.0.0.1,172.17.0.1:39000"}
    assert MPIClusterResolver(environ={**four, **uri}).master().startswith("10.0.0.1:")


def test_keras():
    cluster = discover(environ=KERAS)
    assert (cluster.source, cluster.num_workers, cluster.worker_index) == ("KERAS_DISTRIBUTION", 5, 4)
    assert cluster.addresses == ("h:1", None, None, None, None)
    each = {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1, b:1", "KERAS_DISTRIBUTION_PROCESS_ID": "1"}
    assert discover(environ=each).addresses == ("a:1", "b:1")
    assert KerasClusterResolver(environ=each).master() == "a:1"


def test_survey_says_what_and_why():
    reports = survey({**TF_CONFIG, **TORCHRUN, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "RANK": "9"})
    by_source = {report.source: report for report in reports}
    assert by_source["TF_CONFIG"].won and by_source["TF_CONFIG"].says == "worker 1 (b:1) of 2"
    assert by_source["torchrun"].why == "TF_CONFIG comes first"
    assert by_source["torchrun"].says.startswith("invalid: `RANK` is not smaller")
    assert "srun" in by_source["Slurm"].why


texts = st.sampled_from(["", "0", "1", "2", "-1", "x", "h", "h:1", "h:1,i:2", "99999999999", "1.5", " 1 "])
names = sorted({name for _, variables in IN_ORDER for name in variables} | set(PMI) - {"TF_CONFIG"})


@given(st.dictionaries(st.sampled_from(names), texts))
def test_any_environment_is_an_error_or_a_cluster(environ):
    survey(environ)  # never fails, because bug reports contain its result
    try:
        cluster = discover(environ=environ)
    except ClusterConfigError:
        return
    assert 0 <= cluster.worker_index < cluster.num_workers == len(cluster.addresses)
    assert cluster.local_rank < cluster.local_workers <= cluster.num_workers
