"""Plans the tasks of a job: their indices, addresses, devices and environments. It starts no process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import uuid
from collections.abc import Mapping, Sequence

from kdist.cluster import (
    check_port_free,
    environment,
    hold_free_ports,
    join_address,
    split_address,
    visible_gpus,
)
from kdist.cluster.injection import Fault
from kdist.cluster.roles import task_name
from kdist.errors import InvalidArgumentError
from kdist.launch.linux import JOB_VARIABLE

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")  # set unless the user has set them
GPUS = "CUDA_VISIBLE_DEVICES"
# Hides all GPUs, because frameworks allocate the memory of visible GPUs, which other workers need.
NO_GPU = "-1"
TASK_RESTARTS = 3
EVALUATOR_TIMEOUT = 600.0
# torchrun's agent sets these variables for its own workers. For workers of kdist's launcher, they are wrong.
_STALE = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
# Variables of torchrun, which do not fit tasks with different roles.
_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# TensorFlow's native code logs about ten lines per worker at each start. JAX has the same default.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # warnings and errors


@dataclasses.dataclass(frozen=True)
class Policy:
    """The reaction to failures, and the faults to inject."""

    max_restarts: int = 0  # of the job
    task_restarts: int = TASK_RESTARTS  # of each supporting task: see `supervisor.py`
    evaluator_timeout: float = EVALUATOR_TIMEOUT  # seconds to finish after training has ended
    min_workers: int | None = None  # for a restart after a loss; `None` if the job needs all
    faults: Sequence[Fault] = ()  # of `--inject`


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a worker: its global index, its index on its machine, and the index of the machine."""

    index: int
    local_index: int
    local_workers: int
    host_index: int


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """One task of this machine, by default a worker."""

    index: int  # among all tasks of its role
    address: str  # at which it listens; empty if no task connects to it
    environ: dict[str, str]
    role: str = "worker"  # or "chief", "ps", "evaluator"
    helps: bool = False  # it only supports others: the job ends when all other tasks have ended

    @property
    def name(self) -> str:
        return task_name(self.role, self.index)

    @property
    def full_name(self) -> str:
        return task_name(self.role, self.index, self.address or None)


@dataclasses.dataclass
class JobPlan:
    """The workers of this machine, and the ports that are reserved for them until they start."""

    job_id: str
    num_workers: int
    workers: list[WorkerPlan]
    held: list[socket.socket] = dataclasses.field(default_factory=list)

    def release_ports(self) -> None:
        """Releases the reserved ports, just before the workers start."""
        while self.held:
            self.held.pop().close()


def usable_cores() -> list[int]:
    """Returns the indices of the CPU cores that this process can use."""
    with contextlib.suppress(AttributeError):
        return sorted(os.sched_getaffinity(0)) or [0]
    return list(range(os.cpu_count() or 1))


def count_cores() -> int:
    """Returns the number of CPU cores that this process can use."""
    return len(usable_cores())


def plan_job(
    local_workers: int,
    num_ps: int = 0,
    evaluator: bool = False,
    *,
    hosts: Sequence[str] = (),
    host_index: int = 0,
    backend: str | None = None,
    environ: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
    creates_secret: bool = True,
) -> JobPlan:
    """Plans the tasks of this machine, and reserves their ports until `release_ports`.

    Without parameter servers, the tasks are workers. With parameter servers, they are the coordinator, the
    workers and the servers, in this order. The evaluator is last, on the first machine. It is not in the cluster
    of `TF_CONFIG`, because no task connects to it.

    `hosts` has one `host:port` per machine, in the same order on each machine. Worker `j` of a machine listens at
    its port plus `j`. Without `hosts`, the job uses one machine and only its loopback interface. The tasks
    inherit `environ`, by default the environment of this process. The variables in `extra` override all others.
    If `creates_secret` is true, a job on one machine gets a secret, unless it has a secret.

    Raises:
        InvalidArgumentError: If `host_index` is out of range, or the ports of two hosts overlap.
        ClusterConfigError: If a port of this machine is taken.

    Example:

    >>> from kdist.launch.plan import plan_job
    >>> plan = plan_job(2, num_ps=1, evaluator=True)
    >>> plan.release_ports()
    >>> [task.name for task in plan.workers]
    ['chief', 'worker 0', 'worker 1', 'ps 0', 'evaluator']
    """
    inherited = dict(os.environ if environ is None else environ)
    extra = dict(extra or {})
    if creates_secret and len(hosts) < 2:  # launchers on several machines cannot agree on a new secret
        token = environment.cluster_token(inherited | extra)
        extra[environment.TOKEN_VARIABLE] = token or secrets.token_hex(16)
    held: list[socket.socket] = []
    if hosts:
        addresses = _addresses_of_hosts(hosts, host_index, local_workers)
    else:
        held = hold_free_ports(1 + local_workers + num_ps if num_ps else local_workers)
        addresses = [join_address("127.0.0.1", kept.getsockname()[1]) for kept in held]
    plan = JobPlan(uuid.uuid4().hex, len(addresses), [], held)
    threads = str(max(1, count_cores() // local_workers))
    shared = {name: threads for name in THREADS if name not in inherited}  # an equal share of the cores

    def add(role: str, index: int, address: str, variables: Mapping[str, str], helps: bool = False) -> None:
        told = environ_of(plan.job_id, {**variables, **shared}, backend, inherited, extra)
        plan.workers.append(WorkerPlan(index, address, told, role, helps))

    if num_ps:
        inherited = {name: value for name, value in inherited.items() if name not in _TORCHRUN}
        servers = 1 + local_workers  # the index of the first server
        cluster = {"chief": addresses[:1], "worker": addresses[1:servers], "ps": addresses[servers:]}
        for role, listed in cluster.items():
            for index, address in enumerate(listed):
                config = {"cluster": cluster, "task": {"type": role, "index": index}}
                gpu = _gpu_of_role(inherited, role, index, local_workers)
                add(role, index, address, {"TF_CONFIG": json.dumps(config), **gpu}, role != "chief")
    else:
        for local_index in range(local_workers):
            place = Place(host_index * local_workers + local_index, local_index, local_workers, host_index)
            variables = worker_variables(addresses, place) | _gpus_of_worker(inherited, place)
            add("worker", place.index, addresses[place.index], variables)
    if evaluator and host_index == 0:
        plan.workers.append(_evaluator_of(plan, local_workers, num_ps, inherited, extra))
        plan.num_workers += 1
    return plan


def _evaluator_of(
    plan: JobPlan, num_workers: int, num_ps: int, environ: Mapping[str, str], extra: Mapping[str, str]
) -> WorkerPlan:
    first = plan.workers[0].environ
    config = json.loads(first["TF_CONFIG"]) | {"task": {"type": "evaluator", "index": 0}}
    told = {name: value for name, value in first.items() if name not in _TORCHRUN}
    told["TF_CONFIG"] = json.dumps(config)
    if num_ps:
        told |= _gpu_of_role(environ, "evaluator", 1, num_workers)  # the GPU after the chief's
    elif visible_gpus(environ):
        told |= {GPUS: _first(idle_gpus(plan, environ))}
    return WorkerPlan(0, "", {**told, **extra}, "evaluator", helps=True)


def environ_of(
    job_id: str,
    variables: Mapping[str, str],
    backend: str | None,
    environ: Mapping[str, str],
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Returns the environment of one task. `variables` override inherited ones, and `extra` all others."""
    inherited = {name: value for name, value in environ.items() if name not in _STALE}
    told = {**_QUIET, **inherited, **variables, JOB_VARIABLE: job_id, "PYTHONUNBUFFERED": "1"}
    if backend is not None:
        told["KERAS_BACKEND"] = backend.lower()
    return {**told, **extra}


def _addresses_of_hosts(hosts: Sequence[str], host_index: int, local_workers: int) -> list[str]:
    if not 0 <= host_index < len(hosts):
        raise InvalidArgumentError(
            f"--host-index is out of range: the entries of --hosts have the indices 0 to {len(hosts) - 1}.",
            received={"host_index": host_index, "hosts": list(hosts)},
            hint="Pass the position of this machine in --hosts. On the first machine: --host-index 0",
        )
    addresses = []
    for position, entry in enumerate(hosts):
        host, port = split_address(entry)
        for local_index in range(local_workers):
            address = join_address(host, port + local_index)
            split_address(address, f"--hosts[{position}] plus the index of the worker")
            addresses.append(address)
    if len(set(addresses)) != len(addresses):
        raise InvalidArgumentError(
            "The ports of two entries in --hosts overlap, because each worker of a machine uses the next port.",
            received={"addresses": addresses},
            hint=f"For entries with the same host, choose ports that are at least {local_workers} apart.",
        )
    for local_index in range(local_workers):
        check_port_free(addresses[host_index * local_workers + local_index])
    return addresses


def worker_variables(addresses: Sequence[str], place: Place) -> dict[str, str]:
    """Returns a worker's `TF_CONFIG` and the equivalent variables of torchrun."""
    host, port = split_address(addresses[0])
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": place.index}}
    return {
        "TF_CONFIG": json.dumps(config),
        "RANK": str(place.index),
        "WORLD_SIZE": str(len(addresses)),
        "LOCAL_RANK": str(place.local_index),
        "LOCAL_WORLD_SIZE": str(place.local_workers),
        "GROUP_RANK": str(place.host_index),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _gpus_of_worker(environ: Mapping[str, str], place: Place) -> dict[str, str]:
    """Returns the variable for a worker's GPUs: an equal share, or one shared GPU if there are too few."""
    gpus = visible_gpus(environ)
    if place.local_workers == 1 or not gpus:
        return {}
    each = max(1, len(gpus) // place.local_workers)
    first = place.local_index * each % len(gpus)
    return {GPUS: ",".join(gpus[first : first + each])}


def _gpu_of_role(environ: Mapping[str, str], role: str, index: int, num_workers: int) -> dict[str, str]:
    """Returns the variable for a task's GPU: one per worker, then one for the chief and the evaluator."""
    gpus = visible_gpus(environ)
    if not gpus or (role == "worker" and len(gpus) < num_workers):
        return {}
    if role == "worker":
        return {GPUS: gpus[index]}
    return {GPUS: NO_GPU if role == "ps" else _first(gpus[num_workers + index :])}


def _first(gpus: Sequence[str]) -> str:
    return gpus[0] if gpus else NO_GPU


def idle_gpus(plan: JobPlan, environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the GPUs of this machine that no task of a plan uses."""
    used = {gpu for task in plan.workers for gpu in visible_gpus(task.environ)}
    return [gpu for gpu in visible_gpus(environ) if gpu not in used]
