"""`SlurmClusterResolver`, which reads the cluster of a Slurm job step from the variables that `srun` sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from kdist.cluster.addresses import join_address
from kdist.cluster.cluster_spec import ClusterSpec
from kdist.cluster.environment import visible_gpus
from kdist.cluster.errors import ClusterRuntimeError
from kdist.cluster.resolver import TaskClusterResolver, require
from kdist.errors import ClusterConfigError

_MOST_HOSTS = 100_000  # a range such as n[0-9999999999] is a mistake, not a cluster
_OUTSIDE = "Outside a job step, unset Slurm's variables."
_PASS_NUMBER = "Pass the number yourself, for example: SlurmClusterResolver(tasks_per_node=2)"
_PART = re.compile(r"(?:[^,\[\]\s]|\[[0-9,\-]+\])+")
_HOSTLIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands a Slurm host list. It keeps leading zeros, and a name may contain several ranges.

    Raises:
        ClusterConfigError: If the text is not a valid host list.

    Example:

    >>> from kdist.cluster.slurm import expand_hostlist
    >>> expand_hostlist("n[1-2],m5,o[08-10,12]")
    ['n1', 'n2', 'm5', 'o08', 'o09', 'o10', 'o12']
    """
    if _HOSTLIST.fullmatch(hostlist) is None:
        raise _bad_list(hostlist)
    hosts: list[str] = []
    for part in _PART.findall(hostlist):
        hosts.extend(_expand(part, hostlist))
        if len(hosts) > _MOST_HOSTS:
            raise _bad_list(hostlist)
    return hosts


def _bad_list(hostlist: str) -> ClusterConfigError:
    shown = hostlist if len(hostlist) < 200 else f"{hostlist[:190]}…"
    return ClusterConfigError(
        "The Slurm host list does not have a form such as n[1-3,7],m5.",
        received={"hostlist": shown},
        hint="Compare the list with Slurm's output:\nscontrol show hostnames",
    )


def _expand(part: str, hostlist: str) -> list[str]:
    """Expands the ranges of one name recursively."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    tails = _expand(after, hostlist) if after else [""]
    hosts: list[str] = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first) > 9 or len(last) > 9:
            raise _bad_list(hostlist)
        low, high = int(first), int(last) if dash else int(first)
        if high < low or (high - low + 1) * len(tails) + len(hosts) > _MOST_HOSTS:
            raise _bad_list(hostlist)
        hosts += [before + str(n).zfill(len(first)) + tail for n in range(low, high + 1) for tail in tails]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands Slurm's short form of the number of tasks on each node.

    Raises:
        ClusterConfigError: If the text does not have this form.

    Example:

    >>> from kdist.cluster.slurm import expand_tasks_per_node
    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None or int(match.group(2) or 1) + len(counts) > _MOST_HOSTS:
            raise ClusterConfigError(
                "Slurm's list of tasks per node does not have a form such as 2(x3),1.",
                received={"tasks_per_node": tasks_per_node[:200]},
                hint=_PASS_NUMBER,
            )
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


class SlurmClusterResolver(TaskClusterResolver):
    """Reads the cluster from the variables of a Slurm job step.

    `SLURM_PROCID` is the number of this task. `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST` and
    `SLURM_STEP_TASKS_PER_NODE` provide the values that you do not pass. Tasks must be numbered node by node,
    in the order of the node list, as in `srun`'s block distribution.

    Args:
        jobs: A dictionary from job name to number of tasks. By default, every task is a worker.
        port_base: The port of the first task on each node. Each further task on the node has the next port.
        gpus_per_node: The number of GPUs per node. Defaults to the number of GPUs that this process sees.
        gpus_per_task: The number of GPUs per task. Defaults to an equal share of the node's GPUs.
        tasks_per_node: The number of tasks on each node, or a dictionary from host to number of tasks.
        auto_set_gpu: Whether `cluster_spec()` limits `CUDA_VISIBLE_DEVICES` to the GPUs of this task. It has
            no effect if you pass `environ`.
        rpc_layer: The protocol of TensorFlow's tasks.
        environ: The environment variables. Defaults to `os.environ`.

    Raises:
        ClusterRuntimeError: If a variable is missing, or the numbers of tasks or GPUs do not match. It is
            also a `RuntimeError`.
        ClusterConfigError: If a variable is invalid, or the tasks are not numbered node by node.

    Example:

    >>> from kdist.cluster_resolver import SlurmClusterResolver
    >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    ...         "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    >>> resolver = SlurmClusterResolver(environ=step)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['n1:8888', 'n2:8888']})
    >>> resolver.get_task_info()
    ('worker', 1)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if environ is not None:
            self._environ = environ
        self._process = self._number("PROCID")
        self._jobs = {"worker": self._number("STEP_NUM_TASKS", "NTASKS")} if jobs is None else dict(jobs)
        self._port_base = port_base
        self._tasks_on = self._tasks_on_hosts(tasks_per_node)
        self._auto_set_gpu = auto_set_gpu and environ is None
        self._rpc_layer = rpc_layer
        self._check_tasks()
        self._visible = visible_gpus(environ)
        most = max(self._tasks_on.values())
        self._gpus_per_node = len(self._visible) if gpus_per_node is None else gpus_per_node
        self._gpus_per_task = self._gpus_per_node // most if gpus_per_task is None else gpus_per_task
        if most * self._gpus_per_task > self._gpus_per_node:
            raise ClusterRuntimeError(
                "The tasks of a node need more GPUs than the node has.",
                received={
                    "gpus_per_node": self._gpus_per_node,
                    "gpus_per_task": self._gpus_per_task,
                    "tasks": most,
                },
                hint="Lower gpus_per_task, or request more GPUs from Slurm, for example: srun --gpus-per-task=1",
            )
        self._task_type, self._task_id = self._own_task()
        self._has_set_gpus = False

    def _text(self, *names: str) -> str:
        for name in names:
            if f"SLURM_{name}" in self._environ:
                return self._environ[f"SLURM_{name}"]
        raise ClusterRuntimeError(
            f"`SLURM_{names[0]}` is not set, although Slurm sets it in job steps.",
            received={f"SLURM_{names[0]}": None},
            hint="Start the script with srun:\nsrun --ntasks=2 python train.py",
        )

    def _number(self, *names: str) -> int:
        text = self._text(*names)
        name, valid = f"SLURM_{names[0]}", text.isascii() and text.isdigit()
        require(valid, f"`{name}` is not a non-negative integer.", _OUTSIDE, **{name: text})
        return int(text)

    def _tasks_on_hosts(self, tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
        if isinstance(tasks_per_node, Mapping):
            return dict(tasks_per_node)
        hosts = expand_hostlist(self._text("STEP_NODELIST", "JOB_NODELIST", "NODELIST"))
        if tasks_per_node is not None:
            return {host: int(tasks_per_node) for host in hosts}
        counts = expand_tasks_per_node(self._text("STEP_TASKS_PER_NODE", "TASKS_PER_NODE"))
        require(
            len(counts) == len(hosts),
            "`SLURM_STEP_TASKS_PER_NODE` does not have one number per host of `SLURM_STEP_NODELIST`.",
            _PASS_NUMBER,
            hosts=len(hosts),
            numbers=len(counts),
        )
        return dict(zip(hosts, counts, strict=True))

    def _check_tasks(self) -> None:
        wanted, assigned = sum(self._jobs.values()), sum(self._tasks_on.values())
        if wanted != assigned or not assigned:
            raise ClusterRuntimeError(
                f"The jobs have {wanted} tasks, but Slurm assigned {assigned}.",
                received={"jobs": self._jobs, "assigned": assigned},
                hint=f"Start as many tasks: srun --ntasks={wanted}",
            )
        problem = "`SLURM_PROCID` is not smaller than the number of tasks."
        require(self._process < assigned, problem, _OUTSIDE, SLURM_PROCID=self._process, tasks=assigned)
        # In a cyclic distribution, task 1 is on the second node, so cluster_spec() would be wrong.
        node = self._environ.get("SLURM_NODEID", "")
        owner = [index for index, count in enumerate(self._tasks_on.values()) for _ in range(count)]
        if node.isdigit():
            require(
                int(node) == owner[self._process],
                "Slurm did not number the tasks node by node.",
                "Start the step with block distribution: srun --distribution=block",
                SLURM_PROCID=self._process,
                SLURM_NODEID=int(node),
                expected=owner[self._process],
            )

    def _own_task(self) -> tuple[str | None, int | None]:
        start = 0
        for job, count in sorted(self._jobs.items()):
            if self._process < start + count:
                return job, self._process - start
            start += count
        return None, None

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster. With `auto_set_gpu`, also sets `CUDA_VISIBLE_DEVICES` for this task.

        Returns:
            A `ClusterSpec` with the host and the port of each task.
        """
        addresses: list[str] = []
        places: list[int] = []
        for host, count in self._tasks_on.items():
            addresses += [join_address(host, self._port_base + place) for place in range(count)]
            places += range(count)
        if self._auto_set_gpu and self._gpus_per_task and len(self._visible) == self._gpus_per_node:
            first = places[self._process] * self._gpus_per_task
            mine = self._visible[first : first + self._gpus_per_task]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            self._has_set_gpus = True
        cluster: dict[str, list[str]] = {}
        for job, count in sorted(self._jobs.items()):
            cluster[job], addresses = addresses[:count], addresses[count:]
        return ClusterSpec(cluster)

    @property
    def has_own_gpus(self) -> bool:
        """Whether this task sees only its own GPUs, because Slurm or `cluster_spec()` limited it to them."""
        bound = self._environ.get("SLURM_GPUS_PER_TASK") or self._environ.get("SLURM_NTASKS_PER_GPU")
        by_hand = self._environ.get("SLURM_GPU_BIND", "none").removeprefix("verbose,") != "none"
        per_task = "gpu" in self._environ.get("SLURM_TRES_PER_TASK", "")
        return self._has_set_gpus or bool(bound) or by_hand or per_task

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job and the index of this task.

        Returns:
            A pair such as `("worker", 1)`.
        """
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the number of GPUs per task, such as `{"GPU": 1}`."""
        if not self._gpus_per_task and self._visible:
            return {"GPU": len(self._visible)}  # Slurm has already bound each task to its own GPUs
        return {"GPU": self._gpus_per_task}
