"""The variables of Flux, LSF, LeaderWorkerSets and Vertex AI, and warnings about incomplete descriptions.

They follow flux-environment(7), Lightning's tests of LSF, LeaderWorkerSet's reference, Kinetic's
`pathways_client.py`, and Vertex AI's page on distributed training. No such cluster was available.
"""

import json

import pytest

from kdist.cluster import discover, discovery
from kdist.errors import ClusterConfigError
from kdist.launch.info import cluster_lines

# The second pod of a Keras Kinetic job on TPUs, with the variables that LeaderWorkerSet adds.
KINETIC = {
    "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "proxy", "MEGASCALE_COORDINATOR_ADDRESS": "kinetic-1-0.kinetic-1.default",
    "MEGASCALE_NUM_SLICES": "4", "TPU_WORKER_ID": "1", "LWS_LEADER_ADDRESS": "kinetic-1-0.kinetic-1.default",
    "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1",
}  # fmt: skip
# A LeaderWorkerSet on GKE with TPUs: the leader has no TPU, so TPU_WORKER_ID counts from the first worker.
LWS_TPU = {
    "LWS_LEADER_ADDRESS": "d-0.d.ns", "LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "d-0-1.d,d-0-2.d", "TPU_NAME": "d-0",
}  # fmt: skip
# flux run -N2 -n4: Flux also sets PMI variables, and srun started its brokers, one per node.
FLUX = {
    "FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2KCsd3J", "FLUX_URI": "local:///tmp/flux-x/local-0", "PMI_RANK": "3", "PMI_SIZE": "4",
    "PMI_FD": "21", "MASTER_ADDR": "n1", "MASTER_PORT": "2222",
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
# jsrun -n4 -r2 on two hosts, as on Summit; its MPI also sets the variables of Open MPI.
LSF = {
    "LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "batch5 1 a01n01 42 a01n02 42", "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3", "MASTER_PORT": "2222",
}  # fmt: skip
# From Vertex AI's page on distributed training.
VERTEX = {
    "CLUSTER_SPEC": json.dumps({
        "cluster": {
            "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
            "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
            "workerpool3": ["cmle-training-workerpool3-ab-0:2222"],
        },
        "environment": "cloud",
        "task": {"type": "workerpool1", "index": 1},
        "job": "{}",
    }),
    "CLOUD_ML_JOB_ID": "7",
}  # fmt: skip
# In the format of platforms_test.py, which tests these platforms with all others.
PLATFORMS = {
    "Kinetic": (KINETIC, ("LeaderWorkerSet", 1, 4, "kinetic-1-0.kinetic-1.default:8482")),
    "LeaderWorkerSet": (LWS_TPU, ("LeaderWorkerSet", 2, 3, "d-0.d.ns:8482")),
    "Flux": (FLUX, ("Flux", 3, 4, "n1:2222")),
    "LSF": (LSF, ("LSF", 3, 4, "a01n01:2222")),
    "Vertex AI": (VERTEX, ("Vertex AI", 2, 3, "cmle-training-workerpool0-ab-0:2222")),
}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def test_tasks_of_a_node():
    assert (discover(environ=FLUX).local_rank, discover(environ=FLUX).local_workers) == (1, 2)
    uneven = discover(environ={**FLUX, "FLUX_JOB_SIZE": "5"})
    assert (uneven.local_rank, uneven.num_workers) == (1, 5)
    here = without(FLUX, "MASTER_ADDR", "MASTER_PORT") | {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"}
    address = discover(environ=here).coordinator
    assert (
        address.startswith("127.0.0.1:")
        and address == discover(environ={**here, "FLUX_TASK_RANK": "0"}).coordinator
    )
    assert address != discover(environ={**here, "FLUX_JOB_ID": "other"}).coordinator
    assert (discover(environ=LSF).local_rank, discover(environ=LSF).local_workers) == (1, 2)
    alone = {**LSF, "JSM_NAMESPACE_LOCAL_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "3"}
    assert discover(environ=alone).coordinator == "127.0.0.1:2222"


def test_hosts_of_lsf_in_a_file(tmp_path):
    (tmp_path / "hosts").write_text("batch5\n" + "a01n01\n" * 42 + "a01n02\n" * 42)
    listed = without(LSF, "LSB_MCPU_HOSTS") | {"LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}
    assert discover(environ=listed).coordinator == "a01n01:2222"
    assert discover(environ={**listed, "MASTER_ADDR": "b"}).coordinator == "b:2222"
    (tmp_path / "hosts").unlink()
    with pytest.raises(ClusterConfigError, match=r"(?s)MASTER_ADDR.*jsrun -E MASTER_ADDR"):
        discover(environ=listed)


def test_pools_of_vertex_ai():
    spec = json.loads(VERTEX["CLUSTER_SPEC"])
    found = {}
    for pool, index in (("workerpool0", 0), ("workerpool1", 0), ("workerpool3", 0)):
        told = {"CLUSTER_SPEC": json.dumps({**spec, "task": {"type": pool, "index": index}})}
        found[pool] = discover(environ=told).worker_index, discover(environ=told).num_workers
    assert found == {"workerpool0": (0, 3), "workerpool1": (1, 3), "workerpool3": (0, 1)}
    assert discover(environ={"CLUSTER_SPEC": "of another tool"}).source == "default"


# Environments that hint at a cluster without describing it, and parts of the warning.
NOT_UNDERSTOOD = {
    "numbered pods": ({"JOB_COMPLETION_INDEX": "7"}, ["JOB_COMPLETION_INDEX=7", "Indexed Job: KDIST_NUM_WORKERS is"]),
    "batch script": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ["SLURM_NTASKS=4", "srun"]),
    "torchrun in each task": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
        ["SLURM_STEP_NUM_TASKS=4", "Slurm: torchrun comes first"]),
    "slices alone": (without(KINETIC, *[n for n in KINETIC if n.startswith("LWS_")]),
                     ["MEGASCALE_NUM_SLICES=4", "TPU_WORKER_ID=1", "TPU: the TPU runtime does not list several hosts"]),
    "hosts of LSF": ({"LSB_MCPU_HOSTS": "a 16 b 16"}, ["LSB_MCPU_HOSTS=a 16 b 16"]),
    "a lonely rank": ({"RANK": "9"}, ["RANK=9", "torchrun: RANK and WORLD_SIZE"]),
    "one LeaderWorkerSet variable": ({"LWS_WORKER_INDEX": "2"}, ["LWS_WORKER_INDEX=2", "LWS_GROUP_SIZE is not set"]),
    "Flux without a rank": ({"FLUX_JOB_SIZE": "8"}, ["FLUX_JOB_SIZE=8", "FLUX_TASK_RANK and FLUX_JOB_SIZE are not"]),
}  # fmt: skip


@pytest.mark.kills("cluster_seen_but_not_understood")
@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_a_cluster_that_is_seen_but_not_understood_is_told(case, caplog):
    environ, words = NOT_UNDERSTOOD[case]
    discovery._warn_once.cache_clear()  # mutmut runs all tests several times in one process
    assert discover(environ=environ).num_workers == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for word in (*words, "trains as a single worker", "kdist info", "export TF_CONFIG='{}'"):
        assert word in record.message, record.message
    assert any("trains as a single worker" in line for line in cluster_lines(environ))
    discover(environ=environ)
    assert len(caplog.records) == 1  # once per process
    discover(environ={**environ, "TF_CONFIG": "{}"})
    assert len(caplog.records) == 1 and discover(environ={**environ, "TF_CONFIG": "{}"}).num_workers == 1


def test_one_worker_that_is_meant_is_not_warned_of(caplog):
    for environ in (
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "a"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1"},
        {"LSB_MCPU_HOSTS": "a 16"},
        {"NUM_PROCESSES": "8"},
        {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "1"},
    ):
        assert discover(environ=environ).num_workers == 1
    assert caplog.records == []


WRONG = [
    (KINETIC, {"LWS_WORKER_INDEX": "4"}, "LWS_WORKER_INDEX"),
    (
        KINETIC,
        {"LWS_WORKER_INDEX": None, "TPU_WORKER_ID": "$(LWS_WORKER_INDEX)"},
        "(?s)LWS_WORKER_INDEX.*LeaderWorkerSet 0.6",
    ),
    (KINETIC, {"LWS_GROUP_SIZE": "four"}, "LWS_GROUP_SIZE"),
    (KINETIC, {"LWS_LEADER_ADDRESS": None}, "LWS_LEADER_ADDRESS"),
    (KINETIC, {"LWS_LEADER_ADDRESS": "a b"}, "LWS_LEADER_ADDRESS"),
    (FLUX, {"FLUX_TASK_RANK": "4"}, "FLUX_TASK_RANK"),
    (FLUX, {"FLUX_JOB_SIZE": "x"}, "FLUX_JOB_SIZE"),
    (FLUX, {"FLUX_JOB_NNODES": "-1"}, "FLUX_JOB_NNODES"),
    (FLUX, {"FLUX_TASK_LOCAL_ID": "7"}, "FLUX_TASK_LOCAL_ID"),
    (FLUX, {"MASTER_ADDR": None}, "flux run --env=MASTER_ADDR"),
    (LSF, {"JSM_NAMESPACE_RANK": "4"}, "JSM_NAMESPACE_RANK"),
    (LSF, {"JSM_NAMESPACE_LOCAL_RANK": "x"}, "JSM_NAMESPACE_LOCAL_RANK"),
    (LSF, {"LSB_MCPU_HOSTS": "batch5 1 a,b 42"}, "MASTER_ADDR"),
    (VERTEX, {"CLUSTER_SPEC": '{"workerpool0": 1'}, "CLUSTER_SPEC"),
    (VERTEX, {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a"]}}'}, "CLUSTER_SPEC"),
    (VERTEX, {"CLUSTER_SPEC": '{"cluster": "workerpool0", "task": {}}'}, "CLUSTER_SPEC"),
    (VERTEX, {"CLUSTER_SPEC": '{"cluster": ["workerpool0"], "task": {"type": []}}'}, "CLUSTER_SPEC"),
    (VERTEX, {"CLUSTER_SPEC": '["workerpool0"]' + "[" * 100_000}, "CLUSTER_SPEC"),
]
