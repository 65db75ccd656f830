"""Writes docs/reference/environment.md: all environment variables that kdist reads or sets."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict

from tests.helpers.layers import FILES, ROOT

_SHAPE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|HOME|PYTHONPATH|PYTHONUNBUFFERED|NO_COLOR")
# Names in the code that look like environment variables but are not.
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
        "TCP_NODELAY",
        "TCP_USER_TIMEOUT",
        "KERAS_DISTRIBUTION",
    ),
}
# Suffixes, to which the code adds a prefix.
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
    # Names on the metadata server; the TPU's runtime uses them with a prefix.
    **{end: (f"TPU_{end}",) for end in ("ACCELERATOR_TYPE", "CHIPS_PER_HOST_BOUNDS", "WORKER_ID")},
}

_CORES = "set by the launcher to the worker's share of the cores"
_REMOVED = "removed by the launcher from the environment of workers"
_RAY = "if both are set, Ray's `TorchTrainer` listens at `MASTER_PORT`"
GROUPS: dict[str, dict[str, str]] = {
    "kdist": {
        "KDIST_CLUSTER_TOKEN": "[secret of the job](../security.md#the-token), the same in all processes",
        "KDIST_COORDINATOR_ADDRESS": "address of worker 0, in an [Indexed Job](../cluster.md#kubernetes-jobs)",
        "KDIST_NUM_WORKERS": "number of workers, in an [Indexed Job](../cluster.md#kubernetes-jobs)",
        "CHECKPOINT_DIR": "checkpoint directory for your script, "
        "set by [`kdist manifest`](../launcher.md#kdist-manifest)",
        "KDIST_DEBUG": "1: compare each collective between workers "
        "before it starts ([loops](../loops.md#when-something-is-wrong))",
        "KDIST_DEBUG_TIMEOUT": "with `KDIST_DEBUG`, seconds until a waiting worker prints where it waits (default: 60)",
        "KDIST_HANG_TIMEOUT": "seconds until a worker that [hangs](../resuming.md#hung-workers) "
        "is terminated (default: 600)",
        "KDIST_HEARTBEAT_TIMEOUT": "seconds within which a dead or stopped worker is "
        "[reported](../resuming.md#failure-detection); 4 times as long for a stopped worker on another machine "
        "without `kdist run` (default: 15)",
        "KDIST_INJECT": "faults to inject; set by [`kdist run --inject`](../resuming.md#test-fault-tolerance)",
        "KDIST_JOB_ID": "ID of the job; the launcher sets it to find processes that a worker left behind",
        "KDIST_JOIN_TIMEOUT": "seconds to wait for all workers at startup (default: 300)",
        "KDIST_LOG": "[log level](../launcher.md#log-messages): `debug`, `info`, `warning` or `error` "
        "(default: job plan, missing workers, warnings and errors)",
        "KDIST_PORT_RANGE": "first and last port that kdist may choose, "
        "for example behind a firewall (default: 15000-31999)",
        "KDIST_PROBE": "0: skip the check for [means and sums](../how-it-works.md#means-and-sums) at the first batch",
        "KDIST_TRACE": "directory for [traces](../measuring.md#trace-a-step)",
        "KDIST_RESTART": "number of restarts of this job, set by the launcher (0 at the first start)",
    },
    "Keras": {
        "KERAS_BACKEND": "`tensorflow`, `jax` or `torch`; set by `kdist run --backend`",
        "KERAS_HOME": "directory of Keras's configuration file",
        "HOME": "used to find this file if `KERAS_HOME` is not set",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "address of worker 0, or one address per process",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "number of workers",
        "KERAS_DISTRIBUTION_PROCESS_ID": "index of this worker",
    },
    "System and backends": {
        "CUDA_VISIBLE_DEVICES": "visible GPUs; the launcher divides them among the workers",
        "NCCL_SOCKET_IFNAME": "network interface of NCCL on several machines, set by kdist",
        "GLOO_SOCKET_IFNAME": "network interface of gloo on PyTorch, set by kdist",
        "NCCL_COMM_ID": "if set, kdist does not choose NCCL's network interface",
        "NCCL_CONF_FILE": "the same, if this file names an interface",
        "GRPC_FAIL_FAST": "set for TensorFlow's parameter servers",
        "NO_COLOR": "if set, the launcher prints no colors",
        "OMP_NUM_THREADS": _CORES,
        "TF_NUM_INTRAOP_THREADS": _CORES,
        "TF_NUM_INTEROP_THREADS": "set for workers in tests",
        "PJRT_NPROC": "threads of XLA; set if you request several CPU devices",
        "PYTHONPATH": "import path; extended for workers on Ray",
        "PYTHONUNBUFFERED": "set by the launcher to show output live",
        "TF_CPP_MIN_LOG_LEVEL": "level of TensorFlow's native log, set by the launcher to hide all but problems",
        "XLA_FLAGS": "a number of CPU devices in it is an error: pass device names to the strategy instead",
    },
    "TF_CONFIG and torchrun": {
        "TF_CONFIG": "[cluster and task](../cluster.md) as JSON",
        "RANK": "index of this worker",
        "WORLD_SIZE": "number of workers",
        "LOCAL_RANK": "index of this worker on its machine",
        "LOCAL_WORLD_SIZE": "number of workers on this machine",
        "MASTER_ADDR": "host of worker 0, also under MPI",
        "MASTER_PORT": "port of worker 0, also under MPI",
        "GROUP_RANK": "index of this machine",
        "GROUP_WORLD_SIZE": _REMOVED,
        "ROLE_RANK": _REMOVED,
        "ROLE_WORLD_SIZE": _REMOVED,
        "TORCHELASTIC_RUN_ID": _REMOVED,
        "TORCHELASTIC_USE_AGENT_STORE": "set if torchrun itself listens at `MASTER_PORT`",
        "ACCELERATE_TORCH_DEVICE": _RAY,
        "RAY_RAYLET_PID": _RAY,
    },
    "Slurm": {
        "SLURM_GPUS_PER_TASK": "if set, each task has its own GPUs",
        "SLURM_NTASKS_PER_GPU": "if set, each task has its own GPUs",
        "SLURM_GPU_BIND": "the same, unless it is `none`",
        "SLURM_TRES_PER_TASK": "the same, if it names GPUs",
        "SLURM_JOB_ID": "used to choose ports",
        "SLURM_PROCID": "index of this worker",
        "SLURM_NODEID": "index of this host",
        "SLURM_STEPID": "set in a job step",
        "SLURM_STEP_ID": "set in a job step",
        "SLURM_STEP_NODELIST": "hosts of the job step",
        "SLURM_JOB_NODELIST": "hosts of the job, outside of a job step",
        "SLURM_STEP_NUM_TASKS": "number of workers",
        "SLURM_NTASKS": "number of workers, if the step does not set it",
        "SLURM_STEP_TASKS_PER_NODE": "number of workers per host",
        "SLURM_TASKS_PER_NODE": "number of workers per host, outside of a job step",
    },
    "MPI": {
        "OMPI_COMM_WORLD_RANK": "index of this worker",
        "PMI_RANK": "index of this worker",
        "OMPI_COMM_WORLD_SIZE": "number of workers",
        "PMI_SIZE": "number of workers",
        "OMPI_COMM_WORLD_LOCAL_RANK": "index of this worker on its machine",
        "MPI_LOCALRANKID": "index of this worker on its machine",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "number of workers on this machine",
        "MPI_LOCALNRANKS": "number of workers on this machine",
        "PMIX_NAMESPACE": "name of the job, used to choose a port",
        "PMI_JOBID": "name of the job, used to choose a port",
        "PMI_PORT": "name of the job, used to choose a port",
        "PBS_JOBID": "name of the job, used to choose a port",
    },
    "Kubernetes and Kubeflow": {
        "JOB_COMPLETION_INDEX": "index of this pod in an Indexed Job",
        "COORDINATOR_ADDRESS": "host of worker 0",
        "PET_MASTER_ADDR": "host of worker 0",
        "LWS_LEADER_ADDRESS": "host of worker 0",
        "JAX_COORDINATOR_ADDRESS": "address or host of worker 0",
        "COORDINATOR_PORT": "port of worker 0",
        "JAX_COORDINATOR_PORT": "port of worker 0",
        "PET_MASTER_PORT": "port of worker 0",
        "NUM_PROCESSES": "number of workers",
        "JAX_NUM_PROCESSES": "number of workers",
        "PROCESS_ID": "index of this worker",
        "JAX_PROCESS_ID": "index of this worker",
        "PET_NNODES": "number of pods",
        "LWS_GROUP_SIZE": "number of pods",
        "PET_NODE_RANK": "index of this pod",
        "LWS_WORKER_INDEX": "index of this pod",
        "PET_NPROC_PER_NODE": "number of processes that torchrun would start per pod",
    },
    "Flux and LSF": {
        "FLUX_TASK_RANK": "index of this task",
        "JSM_NAMESPACE_RANK": "index of this task",
        "FLUX_JOB_SIZE": "number of tasks",
        "JSM_NAMESPACE_SIZE": "number of tasks",
        "FLUX_TASK_LOCAL_ID": "index of this task on its host",
        "JSM_NAMESPACE_LOCAL_RANK": "index of this task on its host",
        "JSM_NAMESPACE_LOCAL_SIZE": "number of tasks on this host",
        "FLUX_JOB_NNODES": "number of hosts",
        "LSB_MCPU_HOSTS": "hosts of the job, each with its number of slots",
        "LSB_DJOB_HOSTFILE": "file with the hosts, one line per slot",
        "FLUX_JOB_ID": "used to choose a port",
        "LSB_JOBID": "used to choose a port",
    },
    "SageMaker and Vertex AI": {
        "SM_CURRENT_HOST": "name of this host",
        "SM_HOSTS": "names of all hosts",
        "CLUSTER_SPEC": "worker pools of the Vertex AI job and this task, as JSON",
    },
    "TPU": {
        "TPU_WORKER_HOSTNAMES": "hosts of the slice",
        "TPU_PROCESS_ADDRESSES": "addresses of the hosts, if several processes share a host",
        "TPU_WORKER_ID": "index of this host",
        "CLOUD_TPU_TASK_ID": "index of this process",
        "TPU_ACCELERATOR_TYPE": "type of the slice, for example v4-32",
        "TPU_TOPOLOGY": "layout of the chips",
        "TPU_CHIPS_PER_HOST_BOUNDS": "layout of the chips of a host",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "layout of the chips of a process",
        "TPU_SKIP_MDS_QUERY": "if set, kdist does not query the metadata server",
        "MEGASCALE_COORDINATOR_ADDRESS": "first host of a job on several slices",
        "MEGASCALE_NUM_SLICES": "number of slices",
        "MEGASCALE_SLICE_ID": "index of this slice",
        "GCE_METADATA_HOST": "address of the metadata server",
        "GCE_METADATA_IP": "address of the metadata server",
    },
}
_ABOUT = {
    "System and backends": "If you have set an interface, `GRPC_FAIL_FAST`, `PJRT_NPROC` or a number of threads, "
    "kdist keeps your value.",
    "Kubernetes and Kubeflow": "A JAXJob sets `COORDINATOR_*`, `NUM_PROCESSES` and `PROCESS_ID`. A PyTorchJob or "
    "TrainJob sets `PET_*`, and a LeaderWorkerSet sets `LWS_*`.",
    "TF_CONFIG and torchrun": "`kdist run` sets the variables from `TF_CONFIG` to `GROUP_RANK`.",
}
_HEAD = """\
# Environment variables

This page lists every environment variable that kdist reads or sets. kdist [detects the cluster](../cluster.md) from
these variables when you create a strategy. `kdist info` prints the variables that are set.
"""


def found() -> dict[str, set[str]]:
    """Returns each variable that the code names, with the modules that name it."""
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
    lines = [_HEAD]
    for group, meanings in GROUPS.items():
        lines.append(f"## {group}\n")
        if group in _ABOUT:
            lines.append(f"{_ABOUT[group]}\n")
        lines += ["| variable | meaning |", "| --- | --- |"]
        for meaning, names in itertools.groupby(meanings, key=meanings.__getitem__):
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
