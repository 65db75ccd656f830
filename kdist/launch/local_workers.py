"""Runs the workers of `kdist.launch` as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile

from kdist.cluster import logs
from kdist.cluster.keras_backends import check_backend
from kdist.errors import InvalidArgumentError
from kdist.launch import outline, shipping
from kdist.launch.call import Call, Ended, Ending
from kdist.launch.output import Sink, sinks
from kdist.launch.plan import JobPlan, WorkerPlan, resolve_num_workers
from kdist.launch.role_supervisor import RoleSupervisor
from kdist.launch.roles import plan_roles
from kdist.launch.supervisor import Supervisor
from kdist.launch.worker_process import WorkerProcess

# The program of workers and parameter servers, as a string because the launcher does not import a framework.
_SERVE = """import sys
sys.path[:] = {path!r}
import kdist
resolver = kdist.cluster_resolver.TFConfigClusterResolver()
kdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
"""


def run(call: Call) -> Ending:
    """Runs a function in processes of this machine."""
    check_backend(call.backend)
    if call.resources is not None:
        raise InvalidArgumentError(
            "`resources` applies only to a Ray cluster; workers of this machine share all its resources.",
            received={"resources": call.resources},
            hint='Remove the argument, or pass on="ray".',
        )
    count = resolve_num_workers(call.num_workers)
    payload = shipping.pack_call(call.fn, call.args, call.kwargs, sys.path)
    plan = plan_roles(count, call.num_ps, backend=call.backend, extra=call.env)
    logs.logger.info("%s", outline.line(plan, call.num_workers))
    return run_plan(plan, payload, *sinks(), timeout=call.timeout, prefixed=plan.num_workers > 1)


def run_plan(
    plan: JobPlan, payload: bytes, out: Sink, err: Sink, *, timeout: float | None, prefixed: bool
) -> Ending:
    """Runs a packed call in the workers of a plan. All their processes have ended when it returns.

    Args:
        plan: The plan of the workers.
        payload: The call, from `shipping.pack_call`.
        out: Receives the stdout of the workers.
        err: Receives the stderr of the workers.
        timeout: The time limit in seconds.
        prefixed: Whether each line of output starts with the name of the worker.
    """
    with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
        path = os.path.join(folder, "function")
        with open(path, "wb") as file:
            file.write(payload)
        workers = [
            WorkerProcess(
                worker,
                _command(worker, path, folder),
                out,
                err,
                prefix=f"[{worker.name}] " if prefixed else "",
            )
            for worker in plan.workers
        ]
        if any(worker.helps for worker in plan.workers):
            outcome = RoleSupervisor(workers, plan, err=err, timeout=timeout).run()
        else:
            outcome = Supervisor(workers, plan, timeout=timeout).run()
        ended = {worker.name: _ended(worker, folder) for worker in workers}
    return Ending(
        [ended[worker.name] for worker in workers if not worker.plan.helps],
        ended[outcome.failed.name] if outcome.failed else None,
        [ended[worker.name] for worker in outcome.unfinished if not worker.plan.helps],
    )


def _command(worker: WorkerPlan, path: str, folder: str) -> list[str]:
    if worker.helps:
        return [sys.executable, "-c", _SERVE.format(path=sys.path)]
    return shipping.worker_command("kdist.launch.function_worker", path, _result_path(folder, worker))


def _ended(worker: WorkerProcess, folder: str) -> Ended:
    result: shipping.Result | None = None
    with contextlib.suppress(FileNotFoundError), open(_result_path(folder, worker.plan), "rb") as file:
        result = pickle.load(file)
    tail, plan = worker.tail, worker.plan
    return Ended(plan.index, worker.exit_code, tail.lines(), result, tail.has_lost_another, plan.role)


def _result_path(folder: str, worker: WorkerPlan) -> str:
    return os.path.join(folder, f"result of {worker.name}")
