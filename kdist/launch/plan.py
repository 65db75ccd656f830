"""Plans the workers of a job: their indices, addresses, devices and environments. It starts no process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence

from kdist.cluster import check_port_free, hold_free_ports, join_address, split_address, visible_gpus
from kdist.cluster.roles import task_name
from kdist.errors import InvalidArgumentError
from kdist.launch.linux import JOB_VARIABLE

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")  # set unless the user has set them
GPUS = "CUDA_VISIBLE_DEVICES"
# torchrun's agent sets these variables for its own workers. For workers of kdist's launcher, they are wrong.
_STALE = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
# TensorFlow's native code logs about ten lines per worker at each start. JAX has the same default.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # warnings and errors


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a worker: its global index, its index on its machine, and the index of the machine."""

    index: int
    local_index: int
    local_workers: int
    host_index: int


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """One task of this machine, by default a worker.

    Args:
        index: The index of the task among all tasks of its role.
        address: The address at which it listens; empty if no task connects to it.
        environ: The environment of the task.
        role: "worker", "chief", "ps" or "evaluator".
        helps: Whether the task only supports others. The job ends when all other tasks have ended.
    """

    index: int
    address: str
    environ: dict[str, str]
    role: str = "worker"
    helps: bool = False

    @property
    def name(self) -> str:
        """The name of the task in messages."""
        return task_name(self.role, self.index)

    @property
    def full_name(self) -> str:
        """The name of the task with its address."""
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


def is_auto(num_workers: str | int | None) -> bool:
    """Returns whether the number of workers depends on the available devices."""
    return num_workers is None or str(num_workers).strip().lower() == "auto"


def resolve_num_workers(text: str | int | None, environ: Mapping[str, str] | None = None) -> int:
    """Returns the number of workers for `--num-workers`. "auto" means one per GPU, or one if there is no GPU.

    Without GPUs, several workers share the cores of a machine, and are rarely faster than one worker.

    Raises:
        InvalidArgumentError: If the value is neither "auto" nor an integer from 1 to 10,000.

    Example:

    >>> from kdist.launch.plan import resolve_num_workers
    >>> resolve_num_workers("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    3
    """
    if text is None or is_auto(text):
        return len(visible_gpus(environ)) or 1
    number = str(text).strip()
    if (
        isinstance(text, bool)
        or not (number.isascii() and number.isdigit())
        or not 1 <= int(number[:9]) <= 10_000
    ):
        raise InvalidArgumentError(
            'The number of workers is neither a positive integer nor "auto".',
            received={"num_workers": text},
            hint='Pass a number from 1 to 10000, or "auto".',
        )
    return int(number)


def parse_hosts(text: str | None) -> list[str]:
    """Parses the option `--hosts` into a list of addresses.

    Raises:
        ClusterConfigError: If an entry is not `host:port`.
        InvalidArgumentError: If an entry is repeated.

    Example:

    >>> from kdist.launch.plan import parse_hosts
    >>> parse_hosts("host0:5000, host1:5000")
    ['host0:5000', 'host1:5000']
    """
    if not text:
        return []
    entries = [part.strip() for part in text.split(",")]
    for position, entry in enumerate(entries):
        split_address(entry, f"--hosts[{position}]")
    if len(set(entries)) != len(entries):
        raise InvalidArgumentError(
            "--hosts contains the same address twice.",
            received={"hosts": entries},
            hint="List each machine once, for example: --hosts host0:5000,host1:5000",
        )
    return entries


def plan_job(
    local_workers: int,
    *,
    hosts: Sequence[str] = (),
    host_index: int = 0,
    backend: str | None = None,
    environ: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> JobPlan:
    """Plans the workers of this machine, and reserves their ports until `release_ports`.

    Args:
        local_workers: The number of workers per machine.
        hosts: One `host:port` per machine, in the same order on each machine. Worker `j` of a machine listens
            at its port plus `j`. If empty, the job uses one machine and only its loopback interface.
        host_index: The index of this machine in `hosts`.
        backend: The value of `KERAS_BACKEND`; `None` to keep the inherited value.
        environ: The environment that the workers inherit; by default the environment of this process.
        extra: Additional variables for all workers, which override all others.

    Raises:
        InvalidArgumentError: If `host_index` is out of range, or the ports of two hosts overlap.
        ClusterConfigError: If a port of this machine is taken.
    """
    environ = dict(os.environ if environ is None else environ)
    held: list[socket.socket] = []
    if hosts:
        addresses = _addresses_of_hosts(hosts, host_index, local_workers)
    else:
        held = hold_free_ports(local_workers)
        addresses = [join_address("127.0.0.1", kept.getsockname()[1]) for kept in held]
    job_id = uuid.uuid4().hex
    workers = []
    for local_index in range(local_workers):
        place = Place(host_index * local_workers + local_index, local_index, local_workers, host_index)
        shares = thread_share(environ, local_workers) | _gpu_share(environ, local_index, local_workers)
        workers.append(plan_worker(job_id, addresses, place, backend, environ, {**shares, **(extra or {})}))
    return JobPlan(job_id, len(addresses), workers, held)


def plan_worker(
    job_id: str,
    addresses: Sequence[str],
    place: Place,
    backend: str | None,
    environ: Mapping[str, str],
    extra: Mapping[str, str],
) -> WorkerPlan:
    """Plans one worker.

    Args:
        job_id: The ID of the job, by which the launcher finds the worker's descendants.
        addresses: The addresses of all workers.
        place: The position of the worker.
        backend: The value of `KERAS_BACKEND`; `None` to keep the inherited value.
        environ: The environment that the worker inherits.
        extra: Additional variables, which override all others.
    """
    told = environ_of(job_id, _variables(addresses, place), backend, environ, extra)
    return WorkerPlan(place.index, addresses[place.index], told)


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


def _variables(addresses: Sequence[str], place: Place) -> dict[str, str]:
    """Returns `TF_CONFIG` and the equivalent variables of torchrun."""
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


def thread_share(environ: Mapping[str, str], local_workers: int) -> dict[str, str]:
    """Returns the variables that limit a worker to its share of the cores, unless the user has set them."""
    threads = str(max(1, count_cores() // local_workers))
    return {name: threads for name in THREADS if name not in environ}


def _gpu_share(environ: Mapping[str, str], local_index: int, local_workers: int) -> dict[str, str]:
    """Returns the variable for a worker's GPUs: an equal share, or one shared GPU if there are too few."""
    gpus = visible_gpus(environ)
    if local_workers == 1 or not gpus:
        return {}
    each = max(1, len(gpus) // local_workers)
    first = local_index * each % len(gpus)
    return {GPUS: ",".join(gpus[first : first + each])}


def idle_gpus(plan: JobPlan, environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the GPUs of this machine that no task of a plan uses."""
    used = {gpu for task in plan.workers for gpu in visible_gpus(task.environ)}
    return [gpu for gpu in visible_gpus(environ) if gpu not in used]
