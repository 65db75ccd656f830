"""`ClusterSpec`, the tasks of a cluster and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.cluster.errors import ClusterTypeError
from kdist.errors import ClusterConfigError

_EXAMPLE = 'Describe the cluster as in this example:\nClusterSpec({"worker": ["host0:2222", "host1:2222"]})'


class ClusterSpec:
    """The tasks of a cluster and their addresses, grouped into jobs.

    It has the methods of `tf.train.ClusterSpec`, but does not need TensorFlow. A job is a list of addresses.
    If you know only some of the addresses, a job is a dictionary from task index to address.

    Args:
        cluster: A dictionary from job name to a list of addresses or to a dictionary from task index to
            address. You can also pass another `ClusterSpec` or a `tf.train.ClusterSpec`.

    Raises:
        ClusterTypeError: If `cluster`, a job or an address has the wrong type. It is also a `TypeError`.
        ClusterConfigError: If a task index is not a non-negative integer. It is also a `ValueError`.

    Example:

    >>> from kdist.cluster_resolver import ClusterSpec
    >>> spec = ClusterSpec({"chief": ["host0:2222"], "worker": {1: "host2:2222"}})
    >>> spec.jobs
    ['chief', 'worker']
    >>> spec.task_address("worker", 1)
    'host2:2222'
    >>> spec.job_tasks("worker")
    [None, 'host2:2222']
    """

    def __init__(self, cluster: Any) -> None:
        self._jobs: dict[str, dict[int, str]] = _normalize(cluster)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        try:
            return self._jobs == _normalize(other)
        except ClusterConfigError:
            return False

    __hash__ = None  # type: ignore[assignment]  # unhashable, as in TensorFlow, because it equals dicts

    def __repr__(self) -> str:
        jobs = self.as_dict()
        inside = ", ".join(f"{job!r}: {jobs[job]!r}" for job in sorted(jobs))
        return f"ClusterSpec({{{inside}}})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the cluster as a plain dictionary.

        Returns:
            A dictionary from job name to a list of addresses. If the indices of a job have a gap, the value
            is a dictionary from index to address instead.
        """
        described: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            indices = sorted(tasks)
            dense = bool(indices) and indices[-1] + 1 == len(indices)
            described[job] = [tasks[i] for i in indices] if dense else {i: tasks[i] for i in indices}
        return described

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order of the constructor's argument."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks in a job that have an address.

        Args:
            job_name: The job's name.

        Returns:
            The number of tasks.

        Raises:
            ClusterConfigError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, in ascending order.

        Args:
            job_name: The job's name.

        Returns:
            A list of integers.

        Raises:
            ClusterConfigError: If there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Args:
            job_name: The job's name.
            task_index: The task's index within the job.

        Returns:
            The address, unchanged.

        Raises:
            ClusterConfigError: If there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ClusterConfigError(
                f"Job {job_name!r} has no task {task_index!r}; its tasks are {sorted(tasks)}.",
                received={"job_name": job_name, "task_index": task_index},
                hint="Pass one of these indices, or add the task's address to the cluster.",
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks, in the order of their indices.

        Args:
            job_name: The job's name.

        Returns:
            A list with the address of task `i` at position `i`, or `None` if it is unknown.

        Raises:
            ClusterConfigError: If there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        try:
            return self._jobs[name]
        except (KeyError, TypeError):
            raise ClusterConfigError(
                f"The cluster has no job {name!r}; its jobs are {self.jobs}.",
                received={"job_name": name},
                hint="Pass one of these names, or add the job to the cluster.",
            ) from None


def _normalize(cluster: Any) -> dict[str, dict[int, str]]:
    if isinstance(cluster, ClusterSpec):
        return {job: dict(tasks) for job, tasks in cluster._jobs.items()}
    if not isinstance(cluster, Mapping) and callable(getattr(cluster, "as_dict", None)):
        cluster = cluster.as_dict()  # detects tf.train.ClusterSpec without importing TensorFlow
    if not isinstance(cluster, Mapping):
        raise ClusterTypeError(
            "`cluster` is neither a dictionary from job names to addresses nor a ClusterSpec.",
            received={"cluster": cluster},
            hint=_EXAMPLE,
        )
    jobs: dict[str, dict[int, str]] = {}
    for job, tasks in cluster.items():
        if not isinstance(job, str):
            raise ClusterTypeError(
                f"The job name {job!r} is not a string.", received={"job_name": job}, hint=_EXAMPLE
            )
        jobs[job] = _tasks_of(job, tasks)
    return jobs


def _tasks_of(job: str, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, (list, tuple)):
        pairs = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = [(_task_index(job, key), address) for key, address in tasks.items()]
    else:
        raise ClusterTypeError(
            f"The tasks of job {job!r} are neither a list of addresses nor a dictionary from index to address.",
            received={job: tasks},
            hint=_EXAMPLE,
        )
    for index, address in pairs:
        if not isinstance(address, str):
            raise ClusterTypeError(
                f"The address of task {index} of job {job!r} is not a string.",
                received={"address": address},
                hint=_EXAMPLE,
            )
    return dict(pairs)


def _task_index(job: str, key: Any) -> int:
    try:
        index = int(key)
    except (TypeError, ValueError, OverflowError):
        index = -1
    if index < 0 or isinstance(key, (bool, float)):
        raise ClusterConfigError(
            f"A task index of job {job!r} is not a non-negative integer.",
            received={"index": key},
            hint='Use indices such as in {"worker": {0: "host0:2222", 1: "host1:2222"}}.',
        )
    return index
