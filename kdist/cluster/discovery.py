"""`discover`, which finds the cluster of this process with any launcher."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from kdist.cluster import logs, roles
from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterTypeError
from kdist.cluster.process_variables import ProcessClusterResolver
from kdist.cluster.resolver import require
from kdist.cluster.sources import SOURCES, Source, signs_of_several
from kdist.cluster.tf_config import KNOWN_JOBS
from kdist.errors import ClusterConfigError

_JOBS = ", ".join(KNOWN_JOBS)
_TASK_HINT = (
    'Set the task of this process. In TF_CONFIG: "task": {"type": "worker", "index": 0}. '
    'In a resolver: task_type="worker", task_id=0'
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster and the task of this process in it."""

    resolver: Any  # describes the cluster; `None` if no source describes one
    spec: ClusterSpec  # the known tasks and addresses
    task_type: str  # the job of this process
    task_id: int  # the index of this process within the job
    num_workers: int  # the number of processes that train (the chief and the workers)
    worker_index: int  # the index of this process among them; 0 for the chief
    # In the order of `worker_index`. Unknown addresses are `None`.
    addresses: tuple[str | None, ...]
    coordinator: str | None  # the address of worker 0, or `None` for a single worker
    local_rank: int  # the index of this worker among the workers on its machine
    local_workers: int  # the number of workers on its machine
    rpc_layer: str | None  # the protocol of TensorFlow's tasks, or `None`
    source: str  # of the description, such as "TF_CONFIG"
    # Whether the launcher itself listens at `coordinator`, as torchrun's agent does. Then no worker can listen there.
    coordinator_taken: bool = False

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which prints progress and writes shared files."""
        return self.worker_index == 0

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The names of the workers for messages, such as "worker 1 (host1:2222)"."""
        return tuple(roles.task_name("worker", i, address) for i, address in enumerate(self.addresses))


@dataclasses.dataclass(frozen=True)
class SourceReport:
    """The result of one source, for `kdist info`."""

    source: str
    variables: dict[str, str]
    says: str
    won: bool
    why: str


def discover(resolver: Any = None, environ: Mapping[str, str] | None = None) -> Cluster:
    """Finds the cluster that this process belongs to.

    It uses the first source that describes a cluster: `resolver`, `TF_CONFIG`, torchrun, Flux, LSF's `jsrun`,
    Slurm, MPI (Open MPI, PMI), `KERAS_DISTRIBUTION_*`; then a Kubernetes Indexed Job, JAX programs, torchrun's
    options (`PET_*`), a LeaderWorkerSet, SageMaker, Vertex AI, a TPU runtime with several hosts. Without any,
    this process is a single worker. It logs a warning if variables still indicate several workers. No source uses
    the network. `resolver` can be a resolver of kdist or `tf.distribute.cluster_resolver`.

    Raises:
        ClusterConfigError: If the description in use is invalid. The message names the field or variable.

    Example:

    >>> from kdist.cluster import discover
    >>> cluster = discover(environ={
    ...     "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"})
    >>> cluster.source, cluster.worker_index, cluster.num_workers, cluster.coordinator
    ('torchrun', 1, 2, 'host0:29500')
    >>> discover(environ={}).num_workers
    1
    """
    logs.set_up(environ)
    environ = os.environ if environ is None else environ
    found = _found(resolver, environ)
    if resolver is None and (text := alone_by_mistake(environ, found)):
        _warn_once(text)
    place = f"{found.worker_names[found.worker_index]} of {found.num_workers}"
    logs.logger.debug("cluster from %s: %s, worker 0 at %s", found.source, place, found.coordinator)
    return found


def alone_by_mistake(environ: Mapping[str, str], found: Cluster | None = None) -> str | None:
    """Returns a warning if this process trains alone although variables indicate several, else `None`.

    `TF_CONFIG` is set for or by kdist, so a single worker in it is intentional.
    """
    found = found or _found(None, environ)
    signs = {} if found.num_workers > 1 or found.source == "TF_CONFIG" else signs_of_several(environ)
    if not signs:
        return None
    named = ", ".join(f"{name}={value[:80]}" for name, value in signs.items())
    unused = [
        report for report in survey(environ) if not report.won and signs.keys() & report.variables.keys()
    ]
    reasons = "; ".join(f"{report.source}: {report.why}" for report in unused)
    return (
        f"This process trains as a single worker, although some variables describe several: {named}. "
        f"Reason: {reasons}.\n"
        "Start every worker with a launcher (kdist run, torchrun, srun or mpirun), or set the missing variables. "
        "`kdist info` lists the variables. If each process should train separately: export TF_CONFIG='{}'"
    )


@functools.cache
def _warn_once(text: str) -> None:
    logs.logger.warning("%s", text)


def _found(resolver: Any, environ: Mapping[str, str]) -> Cluster:
    if resolver is not None:
        return _from_resolver(resolver, type(resolver).__name__)
    for source in SOURCES:
        if source.applies(environ)[0]:
            return _from_resolver(source.resolver(environ=environ), source.name)
    return _single(None, ClusterSpec({}), "worker", 0, None, "default")


def survey(environ: Mapping[str, str] | None = None) -> list[SourceReport]:
    """Lists each source that has a variable set, its result, and why `discover` uses it or not.

    The sources are in the order in which `discover` reads them.

    Example:

    >>> from kdist.cluster import survey
    >>> environ = {"TF_CONFIG": "{}", "RANK": "0", "WORLD_SIZE": "1"}
    >>> [(report.source, report.won) for report in survey(environ)]
    [('TF_CONFIG', True), ('torchrun', False)]
    """
    environ = os.environ if environ is None else environ
    reports: list[SourceReport] = []
    winner: str | None = None
    for source in SOURCES:
        variables = {name: environ[name] for name in source.variables if name in environ}
        if not variables:
            continue
        applies, why = source.applies(environ)
        won = applies and winner is None
        if applies and not won:
            why = f"{winner} comes first"
        winner = source.name if won else winner
        says = _summary(source, environ) if applies else "does not describe a cluster"
        reports.append(SourceReport(source.name, variables, says, won, why))
    return reports


def _summary(source: Source, environ: Mapping[str, str]) -> str:
    try:
        resolver = source.resolver(environ=environ)
        task_type, spec = resolver.task_type, resolver.cluster_spec()
        if task_type is not None and ("ps" in spec.jobs or task_type == "evaluator"):
            task_id = roles.server_cluster(resolver).task_id if "ps" in spec.jobs else 0
            return roles.describe(spec, task_type, task_id)
        cluster = _from_resolver(resolver, source.name)
    except ClusterConfigError as error:
        return f"invalid: {' '.join(str(error).splitlines())}"
    return f"{cluster.worker_names[cluster.worker_index]} of {cluster.num_workers}"


def _from_resolver(resolver: Any, source: str) -> Cluster:
    if isinstance(resolver, ProcessClusterResolver) and resolver.task_type == "worker":
        return _from_layout(resolver, source)
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise ClusterTypeError(
            "`cluster_resolver` is not a ClusterResolver of kdist or tf.distribute.",
            received={"cluster_resolver": resolver},
            hint="Pass a resolver, for example:\n"
            "kdist.cluster_resolver.SimpleClusterResolver(kdist.cluster_resolver.ClusterSpec("
            '{"worker": ["host0:5000", "host1:5000"]}), task_type="worker", task_id=0)',
        )
    spec = ClusterSpec(resolver.cluster_spec())
    # Read after cluster_spec(), because TensorFlow's Slurm resolver sets its task there.
    task_type, task_id, rpc_layer = resolver.task_type, resolver.task_id, getattr(resolver, "rpc_layer", None)
    if not spec:
        return _single(resolver, spec, task_type or "worker", task_id or 0, rpc_layer, source)
    _check_task(spec, task_type, task_id, source)
    if task_type == "evaluator":
        return _single(resolver, spec, task_type, task_id, rpc_layer, source)
    tasks = [
        (job, index) for job in ("chief", "worker") if job in spec.jobs for index in spec.task_indices(job)
    ]
    addresses = tuple(spec.task_address(job, index) for job, index in tasks)
    for (job, index), address in zip(tasks, addresses, strict=True):
        split_address(address, f"address of {job} {index} in {source}")
    worker_index = tasks.index((task_type, task_id))
    hosts = ["loopback" if is_loopback(host) else host for host in (split_address(a)[0] for a in addresses)]
    return Cluster(
        resolver=resolver,
        spec=spec,
        task_type=task_type,
        task_id=task_id,
        num_workers=len(tasks),
        worker_index=worker_index,
        addresses=addresses,
        coordinator=addresses[0] if len(tasks) > 1 else None,
        local_rank=hosts[:worker_index].count(hosts[worker_index]),
        local_workers=hosts.count(hosts[worker_index]),
        rpc_layer=rpc_layer,
        source=source,
    )


def _check_task(spec: ClusterSpec, task_type: Any, task_id: Any, source: str) -> None:
    described = {"cluster": spec.as_dict(), "type": task_type, "index": task_id}

    def check(condition: bool, problem: str, hint: str = _TASK_HINT) -> None:
        require(condition, f"{source}: {problem}", hint, **described)

    for job in spec.jobs:
        problem = f"{source}: the job {job!r} is not one of {_JOBS}."
        require(job in KNOWN_JOBS, problem, "Rename the job, or remove it from the cluster.", job=job)
    known = task_type is not None and task_id is not None
    check(known, "the task type or the task index of this process is missing.")
    check(task_type in KNOWN_JOBS, f"the task type of this process is not one of {_JOBS}.")
    check(
        task_type != "ps",
        "this process is a parameter server, which does not train, so it cannot use this strategy.",
        "Start this script only for the jobs chief and worker.",
    )
    if task_type == "evaluator":
        return  # the cluster need not contain it, because no task connects to it
    check(task_type in spec.jobs, "the task type of this process is not a job of the cluster.")
    indices = spec.task_indices(task_type)
    in_range = isinstance(task_id, int) and not isinstance(task_id, bool) and task_id in indices
    check(in_range, f"the task index of this process is not one of {indices}.")
    chiefs = spec.num_tasks("chief") if "chief" in spec.jobs else 0
    check(
        chiefs <= 1,
        "the cluster has more than one chief.",
        "Keep one task in the job chief, and move the others to the job worker.",
    )
    workers = spec.job_tasks("worker") if "worker" in spec.jobs else []
    missing = [index for index, address in enumerate(workers) if address is None]
    # If there is a chief, Kubeflow numbers the workers from 0 or from 1. Both lists are complete.
    check(
        not missing or (missing == [0] and chiefs == 1),
        f"the cluster has no address for the workers {missing}.",
        "List all workers without a gap in the indices.",
    )


def _single(
    resolver: Any, spec: ClusterSpec, task_type: str, task_id: int, rpc_layer: str | None, source: str
) -> Cluster:
    address = None
    if task_type in spec.jobs and task_id in spec.task_indices(task_type):
        address = spec.task_address(task_type, task_id)
    return Cluster(resolver, spec, task_type, task_id, 1, 0, (address,), None, 0, 1, rpc_layer, source)


def _from_layout(resolver: ProcessClusterResolver, source: str) -> Cluster:
    layout = resolver.layout
    index = layout.worker_index if resolver.task_id is None else resolver.task_id
    require(
        isinstance(index, int) and 0 <= index < layout.num_workers,
        f"{source}: `task_id` is not the index of a worker.",
        f"Set task_id to an integer from 0 to {layout.num_workers - 1}.",
        task_id=index,
        num_workers=layout.num_workers,
    )
    return Cluster(
        **dataclasses.asdict(dataclasses.replace(layout, worker_index=index)),
        resolver=resolver,
        spec=resolver.cluster_spec(),
        task_type="worker",
        task_id=index,
        coordinator=layout.coordinator if layout.num_workers > 1 else None,
        rpc_layer=resolver.rpc_layer,
        source=source,
    )
