"""The sources that may describe a cluster, in the order in which `discover` reads them.

Sources closer to the process come first: launchers (kdist, torchrun, flux, jsrun, srun, mpirun), then
settings of the pod (a Job, Kubeflow), then platform metadata. No source uses the network.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from kdist.cluster import pods, tpu_slice
from kdist.cluster.process_variables import (
    KERAS_NAMES,
    KerasClusterResolver,
    MPIClusterResolver,
    TorchrunClusterResolver,
    stable_port,
)
from kdist.cluster.resolver import ClusterResolver
from kdist.cluster.sagemaker import SageMakerClusterResolver
from kdist.cluster.schedulers import (
    FLUX_NAMES,
    LSF_HOSTS,
    LSF_NAMES,
    FluxClusterResolver,
    LSFClusterResolver,
    lsf_hosts,
)
from kdist.cluster.slurm import SlurmClusterResolver
from kdist.cluster.tf_config import VERTEX_NAME, TFConfigClusterResolver, VertexClusterResolver
from kdist.cluster.tpu import TPUClusterResolver

# Returns whether a source describes a cluster, and the reason.
Applies = Callable[[Mapping[str, str]], tuple[bool, str]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A source: its variables, whether they describe a cluster, and the resolver that reads them."""

    name: str
    variables: tuple[str, ...]
    applies: Applies
    resolver: Callable[..., ClusterResolver]


def _if_set(name: str, then: str = "is set", otherwise: str = "is not set") -> Applies:
    """Returns `applies` for a source that describes a cluster if a variable is not empty."""

    def applies(environ: Mapping[str, str]) -> tuple[bool, str]:
        is_set = bool(environ.get(name, "").strip())
        return is_set, f"{name} {then if is_set else otherwise}"

    return applies


def _torchrun_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    numbered = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if _counts_what_nobody_started(environ):
        return (
            False,
            "RANK is the index of a pod, but WORLD_SIZE counts the processes that torchrun would start",
        )
    # Other programs may set one of these names. With MASTER_ADDR, it is a mistake that needs an error.
    if len(numbered) == 2 or (numbered and "MASTER_ADDR" in environ):
        return True, f"{numbered[0]} and {'WORLD_SIZE' if len(numbered) == 2 else 'MASTER_ADDR'} are set"
    return False, "RANK and WORLD_SIZE are not both set"


def _counts_what_nobody_started(environ: Mapping[str, str]) -> bool:
    """Whether a PyTorchJob with several processes per pod set these variables, without torchrun."""
    pod = environ.get("PET_NODE_RANK")
    of_pods = pod is not None and pod == environ.get("RANK") and "LOCAL_RANK" not in environ
    return of_pods and environ.get("PET_NNODES") not in (None, environ.get("WORLD_SIZE"))


SLURM_NAMES = (
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)


def _slurm_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    # A batch script without srun also has SLURM_NTASKS, but it is only one process.
    in_step = "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    if not in_step or "SLURM_PROCID" not in environ:
        return False, "this process is not in a job step (srun)"
    if tasks.strip() in ("", "0", "1"):
        return False, "the job step has one task"
    return True, "this is a job step of several tasks"


def _mpi_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    for kind, index, count in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI", "PMI_RANK", "PMI_SIZE"),
    ):
        if index in environ and count in environ:
            return True, f"the variables of {kind} are set"
    return False, "the rank and the size are not both set"


def _job_applies(names: tuple[str, ...]) -> Applies:
    """Returns `applies` for a scheduler whose first two variables are the task's index and the task count."""
    index, count = names[:2]

    def applies(environ: Mapping[str, str]) -> tuple[bool, str]:
        if index not in environ or count not in environ:
            return False, f"{index} and {count} are not both set"
        if environ[count].strip() == "1":
            return False, "the job has one task"
        return True, f"{index} and {count} are set"

    return applies


def _vertex_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    if '"workerpool' in environ.get(VERTEX_NAME, ""):
        return True, f"{VERTEX_NAME} lists worker pools"
    return False, f"{VERTEX_NAME} does not list worker pools"


def _keras_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    if any(environ.get(name, "").strip() for name in KERAS_NAMES):
        return True, "variables of keras.distribution are set"
    return False, "the variables are empty"


def _jax_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    names = pods.jax_names(environ)
    if names is None:
        return False, "the number of processes and the index of this process are not both set"
    listed = [name for name in names[2:] if name in environ]
    return True, f"{' and '.join(listed)} {'is' if len(listed) == 1 else 'are'} set"


def _tpu_applies(environ: Mapping[str, str]) -> tuple[bool, str]:
    listed = environ.get(tpu_slice.PROCESSES, "").strip() or environ.get(tpu_slice.HOSTS, "").strip()
    slices = environ.get(tpu_slice.SLICES, "").strip()
    if "," in listed or (listed and slices not in ("", "1")):
        return True, "the TPU runtime lists several hosts"
    return False, "the TPU runtime does not list several hosts"


def _slurm(environ: Mapping[str, str]) -> ClusterResolver:
    job = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    # Two jobs on one node must not both use the documented default port, so the port depends on the job ID.
    base = stable_port(job) if any(job) else 8888
    return SlurmClusterResolver(port_base=base, auto_set_gpu=False, environ=environ)


SOURCES = (
    Source(
        "TF_CONFIG",
        ("TF_CONFIG",),
        _if_set("TF_CONFIG", "has priority over all other sources", "is empty"),
        TFConfigClusterResolver,
    ),
    Source(
        "torchrun",
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        _torchrun_applies,
        TorchrunClusterResolver,
    ),
    Source("Flux", FLUX_NAMES, _job_applies(FLUX_NAMES), FluxClusterResolver),
    Source("LSF", (*LSF_NAMES, *LSF_HOSTS), _job_applies(LSF_NAMES), LSFClusterResolver),
    Source("Slurm", SLURM_NAMES, _slurm_applies, _slurm),
    Source(
        "MPI",
        (*MPIClusterResolver._OPEN_MPI, *MPIClusterResolver._PMI),
        _mpi_applies,
        MPIClusterResolver,
    ),
    Source("KERAS_DISTRIBUTION", KERAS_NAMES, _keras_applies, KerasClusterResolver),
    Source(
        "Indexed Job",
        pods.JOB_NAMES,
        _if_set(pods.COUNT, otherwise="is not set, so each pod trains separately"),
        pods.IndexedJobClusterResolver,
    ),
    Source("JAX", (*pods.JAX_NAMES, *pods.JAXJOB_NAMES), _jax_applies, pods.JAXClusterResolver),
    Source(
        "PET",
        pods.PET_NAMES,
        _if_set("PET_NNODES", "is set, and torchrun did not start this process"),
        pods.PETClusterResolver,
    ),
    Source(
        "LeaderWorkerSet",
        pods.LWS_NAMES,
        _if_set(pods.GROUP_SIZE),
        pods.LeaderWorkerSetClusterResolver,
    ),
    Source("SageMaker", ("SM_HOSTS", "SM_CURRENT_HOST"), _if_set("SM_HOSTS"), SageMakerClusterResolver),
    Source("Vertex AI", (VERTEX_NAME,), _vertex_applies, VertexClusterResolver),
    Source("TPU", tpu_slice.NAMES, _tpu_applies, TPUClusterResolver),
)

# Names of variables that contain the number of processes or the index of a process.
_COUNT = re.compile(r".*(SIZE|NTASKS|NUM_(TASKS|PROCESSES|WORKERS|SLICES)|NNODES)")
_NUMBER = re.compile(r".*(RANK|RANKID|INDEX|PROCID|(WORKER|SLICE|PROCESS|LOCAL)_ID)")


def signs_of_several(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of all sources that indicate more than one process."""
    found = {}
    for name in (name for source in SOURCES for name in source.variables if name not in pods.JAXJOB_NAMES):
        text = environ.get(name, "").strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        if (number > 1 and _COUNT.fullmatch(name)) or (number > 0 and _NUMBER.fullmatch(name)):
            found[name] = text
    if len(lsf_hosts({LSF_HOSTS[0]: environ.get(LSF_HOSTS[0], "")})) > 1:
        found[LSF_HOSTS[0]] = environ[LSF_HOSTS[0]]
    return found
