"""Plans jobs whose tasks have different roles: a coordinator, workers, parameter servers and an evaluator."""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence

from kdist.cluster import environment, hold_free_ports, join_address, visible_gpus
from kdist.launch.plan import GPUS, JobPlan, WorkerPlan, environ_of, idle_gpus, plan_job, thread_share

# Hides all GPUs, because frameworks allocate the memory of visible GPUs, which other workers need.
NO_GPU = "-1"
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


def plan_roles(
    local_workers: int,
    num_ps: int = 0,
    evaluator: bool = False,
    *,
    hosts: Sequence[str] = (),
    host_index: int = 0,
    backend: str | None = None,
    environ: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> JobPlan:
    """Plans the tasks of this machine, and reserves their ports until `release_ports`.

    Without parameter servers, the tasks are the workers of `plan_job`. With parameter servers, they are the
    coordinator, the workers and the servers, in this order. The evaluator is last, on the first machine. It
    is not in the cluster of `TF_CONFIG`, because no task connects to it.

    Args:
        local_workers: The number of workers; see `plan_job`.
        num_ps: The number of parameter servers, which require a job on one machine.
        evaluator: Whether the job has an evaluator.
        hosts: See `plan_job`.
        host_index: See `plan_job`.
        backend: See `plan_job`.
        environ: See `plan_job`.
        extra: See `plan_job`.

    Example:

    >>> from kdist.launch.roles import plan_roles
    >>> plan = plan_roles(2, num_ps=1, evaluator=True)
    >>> plan.release_ports()
    >>> [task.name for task in plan.workers]
    ['chief', 'worker 0', 'worker 1', 'ps 0', 'evaluator']
    """
    environ = dict(os.environ if environ is None else environ)
    extra = dict(extra or {})
    if len(hosts) < 2:  # launchers on several machines cannot agree on a new secret
        token = environment.cluster_token(environ | extra)
        extra[environment.TOKEN_VARIABLE] = token or secrets.token_hex(16)
    if num_ps:
        plan = _plan_servers(local_workers, num_ps, backend, environ, extra)
    else:
        plan = plan_job(
            local_workers, hosts=hosts, host_index=host_index, backend=backend, environ=environ, extra=extra
        )
    if evaluator and host_index == 0:
        plan.workers.append(_evaluator_of(plan, local_workers, num_ps, environ, extra))
        plan.num_workers += 1
    return plan


def _plan_servers(
    num_workers: int, num_ps: int, backend: str | None, environ: Mapping[str, str], extra: Mapping[str, str]
) -> JobPlan:
    held = hold_free_ports(1 + num_workers + num_ps)
    addresses = [join_address("127.0.0.1", kept.getsockname()[1]) for kept in held]
    cluster = {
        "chief": addresses[:1],
        "worker": addresses[1 : 1 + num_workers],
        "ps": addresses[1 + num_workers :],
    }
    inherited = {name: value for name, value in environ.items() if name not in _TORCHRUN}
    job_id = uuid.uuid4().hex
    tasks = []
    for role, listed in cluster.items():
        for index, address in enumerate(listed):
            variables = {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
                **thread_share(environ, num_workers),
                **_gpu_share(environ, role, index, num_workers),
            }
            told = environ_of(job_id, variables, backend, inherited, extra)
            tasks.append(WorkerPlan(index, address, told, role, helps=role != "chief"))
    return JobPlan(job_id, len(tasks), tasks, held)


def _evaluator_of(
    plan: JobPlan, num_workers: int, num_ps: int, environ: Mapping[str, str], extra: Mapping[str, str]
) -> WorkerPlan:
    first = plan.workers[0].environ
    config = json.loads(first["TF_CONFIG"]) | {"task": {"type": "evaluator", "index": 0}}
    told = {name: value for name, value in first.items() if name not in _TORCHRUN}
    told["TF_CONFIG"] = json.dumps(config)
    if num_ps:
        told |= _gpu_share(environ, "evaluator", 1, num_workers)  # the GPU after the chief's
    elif visible_gpus(environ):
        told |= {GPUS: _first(idle_gpus(plan, environ))}
    return WorkerPlan(0, "", {**told, **extra}, "evaluator", helps=True)


def _gpu_share(environ: Mapping[str, str], role: str, index: int, num_workers: int) -> dict[str, str]:
    """Returns the variable for a task's GPU: one per worker, then one for the chief and the evaluator."""
    gpus = visible_gpus(environ)
    if not gpus or (role == "worker" and len(gpus) < num_workers):
        return {}
    if role == "worker":
        return {GPUS: gpus[index]}
    return {GPUS: NO_GPU if role == "ps" else _first(gpus[num_workers + index :])}


def _first(gpus: Sequence[str]) -> str:
    return gpus[0] if gpus else NO_GPU
