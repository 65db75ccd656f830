"""Describes the plan of a job: the first line of `kdist run`, and the output of `--dry-run`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from kdist.cluster import visible_gpus
from kdist.cluster.environment import TOKEN_VARIABLE
from kdist.cluster.roles import listed, number_of
from kdist.launch.options import is_auto
from kdist.launch.plan import THREADS, JobPlan, WorkerPlan, idle_gpus

_ORDER = ("chief", "worker", "ps", "evaluator")


def line(plan: JobPlan, num_workers: str | int, num_hosts: int = 1) -> str:
    """Returns a one-line summary of this machine's plan, without importing a framework.

    It does not name the backend, because the script can choose another one than the environment.

    Example:

    >>> from kdist.launch.outline import line
    >>> from kdist.launch.plan import plan_job
    >>> plan = plan_job(2, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    >>> plan.release_ports()
    >>> line(plan, "2")
    '2 workers × 2 gpu, from --num-workers'
    """
    counts = {role: sum(task.role == role for task in plan.workers) for role in _ORDER}
    said = [_number(role, count, num_hosts, plan) for role, count in counts.items() if count]
    gpus = len(visible_gpus())
    found = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU"
    origin = f"auto: {found}" if is_auto(num_workers) else "--num-workers"
    return f"{', '.join(said)}, from {origin}"


def _number(role: str, count: int, num_hosts: int, plan: JobPlan) -> str:
    said = number_of(role, count)
    if role != "worker":
        return said
    if num_hosts > 1:
        said = f"{count} of {number_of(role, count * num_hosts)}"
    return f"{said} × {_devices(next(task for task in plan.workers if task.role == role))}"


def _devices(task: WorkerPlan) -> str:
    gpus = visible_gpus(task.environ)
    return f"{len(gpus)} gpu" if gpus else "1 cpu"


def left_idle(plan: JobPlan, environ: Mapping[str, str] | None = None) -> str:
    """Returns a message about GPUs that no task uses, or an empty string."""
    idle = idle_gpus(plan, environ)
    if not idle:
        return ""
    said = f"GPU {idle[0]} stays idle" if len(idle) == 1 else f"GPUs {listed(idle)} stay idle"
    if any(task.role == "ps" for task in plan.workers):
        return (
            f"{said}, because with --num-ps each worker uses one GPU. To use more GPUs, raise --num-workers."
        )
    total = len(visible_gpus(environ))
    return (
        f"{said}, because all workers get the same number of GPUs. "
        f"To use all, choose a --num-workers that divides {total}."
    )


def details(plan: JobPlan, command: Sequence[str]) -> str:
    """Returns the command, and the address, devices, threads and variables of each task.

    Variables are quoted for the shell. A job secret that the launcher has generated is not shown.
    """
    lines = [f"command: {shlex.join(command)}"]
    for task in plan.workers:
        threads = task.environ.get(THREADS[0], "")
        share = f"{threads} thread{'s' * (threads != '1')}"
        lines.append(f"{task.full_name}: {_devices(task)}, {share}")
        told = {
            name: value for name, value in task.environ.items() if os.environ.get(name) != value and value
        }
        if TOKEN_VARIABLE in told:
            told[TOKEN_VARIABLE] = "(generated for each job)"
        lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(told.items())]
    return "\n".join(lines)
