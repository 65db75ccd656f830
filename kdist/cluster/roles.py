"""Clusters with several types of tasks: coordinator (chief), workers, parameter servers (`ps`), evaluator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.errors import ClusterTypeError
from kdist.cluster.resolver import require
from kdist.cluster.tf_config import KNOWN_JOBS, TFConfigClusterResolver
from kdist.errors import ClusterConfigError

_EXAMPLE = (
    "Start the job with `kdist run --num-workers 2 --num-ps 1 train.py`, or describe the cluster as in this example:\n"
    'ClusterSpec({"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"], "ps": ["host3:2222"]})'
)
_JOBS = ", ".join(KNOWN_JOBS)
_ONE_OF_A_KIND = ("chief", "evaluator")
# The names of one task and of several tasks in messages.
_WORDS = {
    "chief": ("chief", "chiefs"),
    "worker": ("worker", "workers"),
    "ps": ("parameter server", "parameter servers"),
    "evaluator": ("evaluator", "evaluators"),
    "file": ("file", "files"),
}


def task_name(task_type: str, task_id: int, address: str | None = None) -> str:
    """Returns the name of a task for messages.

    Example:

    >>> from kdist.cluster.roles import task_name
    >>> task_name("ps", 1, "host1:2222"), task_name("chief", 0)
    ('ps 1 (host1:2222)', 'chief')
    """
    name = task_type if task_type in _ONE_OF_A_KIND else f"{task_type} {task_id}"
    return f"{name} ({address})" if address else name


def listed(names: Sequence[str]) -> str:
    """Joins names for messages, and shortens long lists.

    Example:

    >>> from kdist.cluster.roles import listed
    >>> listed([f"worker {index}" for index in range(20)])
    'worker 0, worker 1, worker 2, worker 3, worker 4, worker 5 and 14 more'
    """
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def number_of(task_type: str, count: int) -> str:
    """Returns a number of tasks with their type, or of files, for messages.

    Example:

    >>> from kdist.cluster.roles import number_of
    >>> number_of("ps", 2), number_of("worker", 1)
    ('2 parameter servers', '1 worker')
    """
    return f"{count} {_WORDS[task_type][count != 1]}"


@dataclasses.dataclass(frozen=True)
class ServerCluster:
    """A cluster that trains with parameter servers, and this process's task in it."""

    task_type: str  # the job of this process; "chief" for the coordinator
    task_id: int  # the index of this process within the job
    workers: tuple[str, ...]  # the addresses in the order of the indices
    servers: tuple[str, ...]
    chief: str | None = None  # the address of the coordinator, if it is known: no task connects to it
    rpc_layer: str | None = None  # the protocol of TensorFlow's tasks, or `None`

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The names of the workers for messages, such as "worker 1 (host1:2222)"."""
        return tuple(task_name("worker", index, address) for index, address in enumerate(self.workers))

    @property
    def server_names(self) -> tuple[str, ...]:
        """The names of the parameter servers for messages, such as "ps 1 (host3:2222)"."""
        return tuple(task_name("ps", index, address) for index, address in enumerate(self.servers))

    @property
    def name(self) -> str:
        return task_name(self.task_type, self.task_id, self.address)

    @property
    def address(self) -> str | None:
        """The address of this task, or `None` for an evaluator and for a coordinator without an address."""
        if self.task_type == "chief":
            return self.chief
        tasks = {"worker": self.workers, "ps": self.servers}.get(self.task_type)
        return tasks[self.task_id] if tasks else None


def server_cluster(resolver: Any = None, environ: Mapping[str, str] | None = None) -> ServerCluster:
    """Checks that a cluster can train with parameter servers, and returns its addresses.

    The default of `resolver` is `TF_CONFIG`. If it has no task type, this process is the coordinator.

    Raises:
        ClusterConfigError: If there is no worker or no server, or a job is unknown or has too many tasks; if
            an address is invalid or used twice; or if this process is not one of the tasks.

    Example:

    >>> from kdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
    >>> from kdist.cluster.roles import server_cluster
    >>> spec = ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})
    >>> found = server_cluster(SimpleClusterResolver(spec, task_type="ps", task_id=0))
    >>> found.name, found.workers
    ('ps 0 (host2:2222)', ('host1:2222',))
    >>> server_cluster(SimpleClusterResolver(spec)).task_type
    'chief'
    """
    if resolver is None:
        resolver = TFConfigClusterResolver(environ=environ)
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise ClusterTypeError(
            "`cluster_resolver` is not a ClusterResolver of kdist or tf.distribute.",
            received={"cluster_resolver": resolver},
            hint="Pass a resolver, for example: kdist.cluster_resolver.TFConfigClusterResolver()",
        )
    spec = ClusterSpec(resolver.cluster_spec())
    _check_jobs(spec)
    _check_addresses(spec)
    task_type, task_id = _own_task(spec, resolver.task_type, resolver.task_id)
    addresses = {job: tuple(spec.task_address(job, i) for i in spec.task_indices(job)) for job in spec.jobs}
    return ServerCluster(
        task_type,
        task_id,
        addresses["worker"],
        addresses["ps"],
        chief=next(iter(addresses.get("chief", ())), None),
        rpc_layer=getattr(resolver, "rpc_layer", None),
    )


def coordinator_cluster(resolver: Any = None) -> ServerCluster:
    """Like `server_cluster`, but only for the coordinator, because only it can create a strategy.

    Raises:
        ClusterConfigError: If `server_cluster` raises it, or this process is not the chief.
    """
    cluster = server_cluster(resolver)
    if cluster.task_type == "evaluator":
        hint = (
            "In the evaluator, create the model without a strategy:\nkdist.SidecarEvaluator(model, …).start()"
        )
    else:
        hint = (
            "In workers and parameter servers, start a server before you create a strategy:\n"
            'if resolver.task_type in ("worker", "ps"): kdist.Server(resolver.cluster_spec(), '
            "job_name=resolver.task_type, task_index=resolver.task_id).join()"
        )
    require(
        cluster.task_type == "chief",
        "This process is not the chief, so it cannot create a strategy with parameter servers.",
        hint,
        this_task=cluster.name,
    )
    return cluster


def own_role(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Returns the task in `TF_CONFIG` if it is an evaluator or there are parameter servers, else `None`.

    Example:

    >>> from kdist.cluster.roles import own_role
    >>> task = '"task": {"type": "worker", "index": 1}'
    >>> own_role({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, ' + task + "}"})
    ('worker', 1)
    >>> own_role({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, ' + task + "}"}) is None
    True
    """
    resolver = TFConfigClusterResolver(environ=environ)
    try:
        job, index, spec = resolver.task_type, resolver.task_id, resolver.cluster_spec()
    except ClusterConfigError:
        return None
    return (job, index or 0) if job and ("ps" in spec.jobs or job == "evaluator") else None


def describe(spec: ClusterSpec, task_type: str, task_id: int) -> str:
    """Returns a description of a task and its cluster, for messages.

    Example:

    >>> from kdist.cluster_resolver import ClusterSpec
    >>> from kdist.cluster.roles import describe
    >>> describe(ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}), "ps", 0)
    'ps 0 (d:1) of 1 chief, 2 workers, 1 parameter server'
    """
    known = task_type in spec.jobs and task_id in spec.task_indices(task_type)
    name = task_name(task_type, task_id, spec.task_address(task_type, task_id) if known else None)
    counts = [(spec.num_tasks(job), job) for job in KNOWN_JOBS if job in spec.jobs and spec.num_tasks(job)]
    return f"{name} of {', '.join(number_of(job, count) for count, job in counts)}"


def _check_jobs(spec: ClusterSpec) -> None:
    received: dict[str, Any] = {"cluster": spec.as_dict()}
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    require(
        "master" not in counts,
        'The cluster has a job "master", the name of the job "chief" in TensorFlow 1.',
        'Remove the job "master".' if "chief" in counts else 'Rename the job to "chief".',
        **received,
    )
    for job in spec.jobs:
        require(job in KNOWN_JOBS, f"The job {job!r} is not one of {_JOBS}.", _EXAMPLE, job=job, **received)
    for job in _ONE_OF_A_KIND:
        problem = f'The cluster has more than one task of the job "{job}".'
        require(counts.get(job, 0) <= 1, problem, f'Keep one task of the job "{job}".', **received)
    for job, what in (("worker", "worker,"), ("ps", "parameter server, a task of the job ps,")):
        problem = f"The cluster has no {what} but training with parameter servers needs at least one."
        require(counts.get(job, 0) > 0, problem, _EXAMPLE, **received)
        for index, address in enumerate(spec.job_tasks(job)):
            problem = f"The cluster has no address for {task_name(job, index)}."
            require(bool(address), problem, "List all tasks without a gap in the indices.", **received)


def _check_addresses(spec: ClusterSpec) -> None:
    seen: dict[tuple[str, int], str] = {}
    for job in spec.jobs:
        for index in spec.task_indices(job):
            address, name = spec.task_address(job, index), task_name(job, index)
            host, port = split_address(address, f"address of {name}")
            place = ("loopback" if is_loopback(host) else host.lower(), port)
            require(
                place not in seen,
                f"{seen.get(place)} and {name} have the same address.",
                "Give each task a different port.",
                address=address,
            )
            seen[place] = name


def _own_task(spec: ClusterSpec, task_type: Any, task_id: Any) -> tuple[str, int]:
    received = {"task_type": task_type, "task_id": task_id, "cluster": spec.as_dict()}
    if task_type in (None, ""):
        return "chief", 0
    require(
        task_type in KNOWN_JOBS,
        f"`task_type` is not one of {_JOBS}.",
        'Set the job of this process, for example: task_type="worker"',
        **received,
    )
    if task_type not in spec.jobs or not spec.num_tasks(task_type):
        # No task connects to an evaluator, so the cluster need not contain it.
        require(task_type == "evaluator", "`task_type` is not a job of the cluster.", _EXAMPLE, **received)
        return task_type, 0
    indices = spec.task_indices(task_type)
    if task_id is None and task_type in _ONE_OF_A_KIND:
        return task_type, indices[0]
    require(
        isinstance(task_id, int) and task_id in indices,
        f'`task_id` is not one of the indices of the job "{task_type}": {indices}.',
        "Set task_id to one of these indices.",
        **received,
    )
    return task_type, task_id
