"""The sources that may describe a cluster, in the order in which `discover` asks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from kdist.cluster.process_variables import (
    KerasClusterResolver,
    MPIClusterResolver,
    TorchrunClusterResolver,
    stable_port,
)
from kdist.cluster.resolver import ClusterResolver
from kdist.cluster.slurm import SlurmClusterResolver
from kdist.cluster.tf_config import TFConfigClusterResolver


@dataclasses.dataclass(frozen=True)
class Source:
    """One source: its variables, whether they describe a cluster, and the resolver that reads them."""

    name: str
    variables: tuple[str, ...]
    # Returns whether the source describes a cluster, and the reason in words.
    applies: Callable[[Mapping[str, str]], tuple[bool, str]]
    make: Callable[[Mapping[str, str]], ClusterResolver]


def _tf_config_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    if not environ.get("TF_CONFIG", "").strip():
        return False, "TF_CONFIG is empty"
    return True, "TF_CONFIG is the first source that is asked"


def _torchrun_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    numbered = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    # One of the two alone is a common name for other things; with MASTER_ADDR it is a mistake worth an error.
    if len(numbered) == 2 or (numbered and "MASTER_ADDR" in environ):
        return True, f"{numbered[0]} and {'WORLD_SIZE' if len(numbered) == 2 else 'MASTER_ADDR'} are set"
    return False, "RANK and WORLD_SIZE are not both set"


def _slurm_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    # A batch script without srun has SLURM_NTASKS too, but only one process runs in it.
    in_step = "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    if not in_step or "SLURM_PROCID" not in environ:
        return False, "not inside a job step (srun)"
    if tasks.strip() in ("", "0", "1"):
        return False, "the job step has one task"
    return True, "a job step of several tasks"


def _mpi_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    for kind, index, count in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI", "PMI_RANK", "PMI_SIZE"),
    ):
        if index in environ and count in environ:
            return True, f"the variables of {kind} are set"
    return False, "rank and size are not both set"


def _keras_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    if any(environ.get(name, "").strip() for name in _KERAS_NAMES):
        return True, "variables of keras.distribution are set"
    return False, "they are empty"


def _make_slurm(environ: Mapping[str, str]) -> ClusterResolver:
    job = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    # The documented default port would clash between two jobs on one node; the job's number tells them apart.
    base = stable_port(job) if any(job) else 8888
    return SlurmClusterResolver(port_base=base, auto_set_gpu=False, environ=environ)


_KERAS_NAMES = tuple(
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)
SOURCES = (
    Source("TF_CONFIG", ("TF_CONFIG",), _tf_config_applies, lambda e: TFConfigClusterResolver(environ=e)),
    Source(
        "torchrun",
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        _torchrun_applies,
        lambda e: TorchrunClusterResolver(environ=e),
    ),
    Source(
        "Slurm",
        (
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        _slurm_applies,
        _make_slurm,
    ),
    Source(
        "MPI",
        (*MPIClusterResolver._OPEN_MPI, *MPIClusterResolver._PMI),
        _mpi_applies,
        lambda e: MPIClusterResolver(environ=e),
    ),
    Source("KERAS_DISTRIBUTION", _KERAS_NAMES, _keras_applies, lambda e: KerasClusterResolver(environ=e)),
)
