"""docs/reference/environment.md: every environment variable that kdist reads or sets, found in its syntax trees."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.house import FILES, ROOT

_SHAPE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|HOME|PYTHONPATH|PYTHONUNBUFFERED|NO_COLOR")
# What looks like a variable in the code, and is none.
_OTHER = {
    *(
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "SSL_ERROR_SSL",
        "VARIABLE_VALUE",
        "F8_E4M3",
        "F8_E5M2",
        "GLOBAL_SETTINGS_TRACKER",
        "GLOBAL_STATE_TRACKER",
    ),
    *("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "PER_REPLICA", "PER_WORKER", "SC_CLK_TCK", "SC_PAGE_SIZE"),
    *(
        "SC_PHYS_PAGES",
        "TCP_KEEPCNT",
        "TCP_KEEPIDLE",
        "TCP_KEEPINTVL",
        "TCP_USER_TIMEOUT",
        "KERAS_DISTRIBUTION",
    ),
}
# Ends of names, to which the code adds what they begin with.
_ENDS = {
    **{end: (f"KERAS_DISTRIBUTION_{end}",) for end in ("JOB_ADDRESSES",)},
    **{end: (end, f"KERAS_DISTRIBUTION_{end}") for end in ("NUM_PROCESSES", "PROCESS_ID")},
    **{
        end: (f"SLURM_{end}",)
        for end in (
            "JOB_NODELIST",
            "STEP_NODELIST",
            "STEP_NUM_TASKS",
            "STEP_TASKS_PER_NODE",
            "TASKS_PER_NODE",
        )
    },
    # The names of the metadata server, which are then those of the TPU's runtime.
    **{end: (f"TPU_{end}",) for end in ("ACCELERATOR_TYPE", "CHIPS_PER_HOST_BOUNDS", "WORKER_ID")},
}

GROUPS: dict[str, dict[str, str]] = {
    "kdist's own": {
        "KDIST_CLUSTER_TOKEN": "[the secret of a job](../security.md#the-token), the same for all of its processes",
        "KDIST_COORDINATOR_ADDRESS": "worker 0's address, of an [Indexed Job](../cluster.md#kubernetes-jobs)",
        "CHECKPOINT_DIR": "set by [`kdist manifest`](../launcher.md#kdist-manifest), for the script to read",
        "KDIST_DEBUG": "1: each collective is compared before it starts ([loops](../loops.md#when-something-is-wrong))",
        "KDIST_DEBUG_TIMEOUT": "seconds after which a worker that waits prints where, with `KDIST_DEBUG`; 60",
        "KDIST_HANG_TIMEOUT": "seconds after which a worker that [hangs](../failures.md#a-worker-hangs) ends; 600",
        "KDIST_HEARTBEAT_TIMEOUT": "seconds after which a worker that is dead or stopped must have been noticed; 15",
        "KDIST_INJECT": "faults on purpose; `kdist run --inject` [sets it](../failures.md#rehearse)",
        "KDIST_JOB_ID": "names the job; set by the launcher, which finds processes that a worker left behind by it",
        "KDIST_JOIN_TIMEOUT": "seconds that workers wait for each other at the start; 300",
        "KDIST_LOG": "`debug`, `info`, `warning` or `error`: [how much is said](../launcher.md#what-it-says)",
        "KDIST_NUM_WORKERS": "how many workers an [Indexed Job](../cluster.md#kubernetes-jobs) has",
        "KDIST_PROBE": "0: no [means and sums](../how-it-works.md#means-and-sums) are told apart",
        "KDIST_TRACE": "a folder: each worker writes what it did when, for Perfetto to draw",
        "KDIST_RESTART": "how often the job was started again, from 0; set by the launcher",
    },
    "Of Keras": {
        "KERAS_BACKEND": "`tensorflow`, `jax` or `torch`; `kdist run --backend` sets it",
        "KERAS_HOME": "where Keras's configuration file is",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "worker 0's address, or one for each process",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "how many workers there are",
        "KERAS_DISTRIBUTION_PROCESS_ID": "which worker this is",
    },
    "Of the system and of the engines": {
        "CUDA_VISIBLE_DEVICES": "which GPUs there are; the launcher shares them out",
        "GLOO_SOCKET_IFNAME": "gloo's network interface on PyTorch, unless you have set it",
        "GRPC_FAIL_FAST": "set for TensorFlow's parameter servers, unless you have set it",
        "HOME": "where Keras's configuration file is, without `KERAS_HOME`",
        "NCCL_COMM_ID": "if set, kdist leaves NCCL's network interface alone",
        "NCCL_CONF_FILE": "likewise, if the file names an interface",
        "NCCL_SOCKET_IFNAME": "NCCL's network interface between several machines, unless you have set it",
        "NO_COLOR": "the launcher prints no colours",
        "OMP_NUM_THREADS": "set by the launcher to a share of the cores, unless you have set it",
        "PJRT_NPROC": "threads of XLA's, set where several CPU devices are asked for, unless you have",
        "PYTHONPATH": "what Ray's workers import from is put in front of it",
        "PYTHONUNBUFFERED": "set by the launcher, so that output is live",
        "TF_CPP_MIN_LOG_LEVEL": "set for `kdist info`, so that TensorFlow is silent",
        "TF_NUM_INTEROP_THREADS": "set in the workers of tests",
        "TF_NUM_INTRAOP_THREADS": "set by the launcher to a share of the cores, unless you have set it",
        "XLA_FLAGS": "a number of CPU devices in it is an error: name the devices instead",
    },
    "TF_CONFIG": {"TF_CONFIG": "[the cluster and the task](../cluster.md), as JSON; set by the launcher"},
    "Of torchrun": {
        "RANK": "which worker this is; set by the launcher, too",
        "WORLD_SIZE": "how many workers there are; set by the launcher, too",
        "LOCAL_RANK": "which worker of this machine this is; set by the launcher, too",
        "LOCAL_WORLD_SIZE": "how many workers this machine has; set by the launcher, too",
        "MASTER_ADDR": "worker 0's host; set by the launcher, too; MPI's workers read it as well",
        "MASTER_PORT": "worker 0's port; likewise",
        "GROUP_RANK": "which machine this is; set by the launcher, too",
        "GROUP_WORLD_SIZE": "removed by the launcher from what workers inherit",
        "ROLE_RANK": "likewise",
        "ROLE_WORLD_SIZE": "likewise",
        "TORCHELASTIC_RESTART_COUNT": "how often torchrun has started the job again",
        "TORCHELASTIC_RUN_ID": "removed by the launcher from what workers inherit",
        "TORCHELASTIC_USE_AGENT_STORE": "says that torchrun itself listens at `MASTER_PORT`",
        "ACCELERATE_TORCH_DEVICE": "with `RAY_RAYLET_PID`: Ray's `TorchTrainer` listens there",
        "RAY_RAYLET_PID": "see `ACCELERATE_TORCH_DEVICE`",
    },
    "Of Slurm": {
        "SLURM_GPUS_PER_TASK": "if set, each task has GPUs of its own",
        "SLURM_GPU_BIND": "likewise, unless it is `none`",
        "SLURM_NTASKS_PER_GPU": "likewise",
        "SLURM_TRES_PER_TASK": "likewise, if it names GPUs",
        "SLURM_JOB_ID": "from which ports are derived",
        "SLURM_JOB_NODELIST": "the hosts, without a job step",
        "SLURM_NODEID": "which host this is",
        "SLURM_NTASKS": "how many tasks the job has, where a step does not say",
        "SLURM_PROCID": "which worker this is",
        "SLURM_STEPID": "says that this is a job step",
        "SLURM_STEP_ID": "likewise",
        "SLURM_STEP_NODELIST": "the hosts of the step",
        "SLURM_STEP_NUM_TASKS": "how many workers there are",
        "SLURM_STEP_TASKS_PER_NODE": "how many of them each host has",
        "SLURM_TASKS_PER_NODE": "likewise, without a job step",
    },
    "Of MPI": {
        "OMPI_COMM_WORLD_RANK": "which worker this is (Open MPI)",
        "OMPI_COMM_WORLD_SIZE": "how many there are",
        "OMPI_COMM_WORLD_LOCAL_RANK": "which worker of this machine this is",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "how many this machine has",
        "PMI_RANK": "which worker this is (MPICH, Intel MPI)",
        "PMI_SIZE": "how many there are",
        "MPI_LOCALRANKID": "which worker of this machine this is",
        "MPI_LOCALNRANKS": "how many this machine has",
        "PMIX_NAMESPACE": "a name of the job, from which a port is derived",
        "PMI_JOBID": "likewise",
        "PMI_PORT": "likewise",
        "PBS_JOBID": "likewise",
    },
    "Of Kubernetes and Kubeflow": {
        "JOB_COMPLETION_INDEX": "which pod of an Indexed Job this is",
        "COORDINATOR_ADDRESS": "worker 0's host (JAXJob)",
        "COORDINATOR_PORT": "worker 0's port",
        "NUM_PROCESSES": "how many workers there are",
        "PROCESS_ID": "which worker this is",
        "JAX_COORDINATOR_ADDRESS": "worker 0's address, or its host",
        "JAX_COORDINATOR_PORT": "worker 0's port",
        "JAX_NUM_PROCESSES": "how many workers there are",
        "JAX_PROCESS_ID": "which worker this is",
        "PET_MASTER_ADDR": "worker 0's host (PyTorchJob)",
        "PET_MASTER_PORT": "worker 0's port",
        "PET_NNODES": "how many pods there are",
        "PET_NODE_RANK": "which pod this is",
        "PET_NPROC_PER_NODE": "how many processes torchrun would start in a pod",
    },
    "Of SageMaker": {
        "SM_CURRENT_HOST": "the name of this host",
        "SM_HOSTS": "the names of all hosts",
    },
    "Of Flux": {
        "FLUX_TASK_RANK": "the number of this task",
        "FLUX_JOB_SIZE": "how many tasks there are",
        "FLUX_TASK_LOCAL_ID": "its number on its node",
        "FLUX_JOB_NNODES": "how many nodes there are",
        "FLUX_JOB_ID": "the port is made from it",
    },
    "Of LSF": {
        "JSM_NAMESPACE_RANK": "the number of this task of `jsrun`",
        "JSM_NAMESPACE_SIZE": "how many tasks there are",
        "JSM_NAMESPACE_LOCAL_RANK": "its number on its host",
        "JSM_NAMESPACE_LOCAL_SIZE": "how many tasks its host has",
        "LSB_MCPU_HOSTS": "the hosts of the job, each with its number of slots",
        "LSB_DJOB_HOSTFILE": "a file that lists the hosts, a line per slot",
        "LSB_JOBID": "the port is made from it",
    },
    "Of LeaderWorkerSets": {
        "LWS_LEADER_ADDRESS": "the host of the group's leader, which is worker 0",
        "LWS_GROUP_SIZE": "how many pods the group has",
        "LWS_WORKER_INDEX": "the number of this pod",
    },
    "Of Vertex AI": {
        "CLUSTER_SPEC": "the worker pools of the job and this task, as JSON",
    },
    "Of TPUs": {
        "TPU_WORKER_HOSTNAMES": "the hosts of the slice",
        "TPU_PROCESS_ADDRESSES": "their addresses, where several processes share a host",
        "TPU_WORKER_ID": "which host this is",
        "CLOUD_TPU_TASK_ID": "which process this is",
        "TPU_ACCELERATOR_TYPE": "the kind of slice, such as v4-32",
        "TPU_TOPOLOGY": "how its chips are laid out",
        "TPU_CHIPS_PER_HOST_BOUNDS": "how many chips a host has",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "how many chips a process has",
        "TPU_SKIP_MDS_QUERY": "the metadata server is not asked",
        "MEGASCALE_COORDINATOR_ADDRESS": "the first host of several slices",
        "MEGASCALE_NUM_SLICES": "how many slices there are",
        "MEGASCALE_SLICE_ID": "which slice this is",
        "GCE_METADATA_HOST": "where the metadata server is",
        "GCE_METADATA_IP": "likewise",
    },
}
_HEAD = """\
# Environment variables

All that kdist reads or sets, found in its code. What [describes a cluster](../cluster.md) is read where a
strategy is made, and `kdist info` shows which of these are set.
"""


def found() -> dict[str, set[str]]:
    """Each variable that the code names, and the modules that do."""
    where: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(node, ast.keyword):  # environment.patched(NAME=…)
                name = node.arg
            if isinstance(name, str) and _SHAPE.fullmatch(name) and name not in _OTHER:
                for full in _ENDS.get(name, (name,)):
                    where[full].add(str(path.relative_to(ROOT)))
    return where


def write() -> str:
    """Returns the page."""
    where = found()
    lines = [_HEAD]
    for group, meanings in GROUPS.items():
        lines += [f"## {group}\n", "| variable | meaning | in |", "| --- | --- | --- |"]
        for name, meaning in meanings.items():
            files = sorted(where.get(name, ()))
            shown = ", ".join(f"`{file.removeprefix('kdist/')}`" for file in files)
            lines.append(f"| `{name}` | {meaning} | {shown} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
