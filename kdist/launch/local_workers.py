"""Runs workers as processes of this machine: for `kdist.launch`, and for modules of kdist's own commands."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kdist.cluster import logs
from kdist.cluster.keras_backends import check_backend
from kdist.errors import InvalidArgumentError, LaunchError
from kdist.launch import outline, shipping
from kdist.launch.options import resolve_num_workers
from kdist.launch.output import Sink, sinks
from kdist.launch.plan import JobPlan, WorkerPlan, plan_job
from kdist.launch.shipping import Call, Ended, Ending
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
    plan = plan_job(count, call.num_ps, backend=call.backend, extra=call.env)
    logs.logger.info("%s", outline.line(plan, call.num_workers))
    return run_plan(plan, payload, *sinks(), timeout=call.timeout, prefixed=plan.num_workers > 1)


def run_plan(
    plan: JobPlan, payload: bytes, out: Sink, err: Sink, *, timeout: float | None, prefixed: bool
) -> Ending:
    """Runs a packed call in the workers of a plan. All their processes have ended when it returns.

    The payload comes from `shipping.pack_call`. If `prefixed` is true, each line of output starts with the
    worker's name.
    """
    with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
        path = os.path.join(folder, "function")
        with open(path, "wb") as file:
            file.write(payload)
        workers = []
        for worker in plan.workers:
            command = [sys.executable, "-c", _SERVE.format(path=sys.path)]
            if not worker.helps:
                result = _result_path(folder, worker)
                command = shipping.worker_command("kdist.launch.shipping", path, result)
            prefix = f"[{worker.name}] " if prefixed else ""
            workers.append(WorkerProcess(worker, command, out, err, prefix))
        outcome = Supervisor(workers, plan, err, timeout=timeout).run()
        ended = {worker.name: _ended(worker, folder) for worker in workers}
    return Ending(
        [ended[worker.name] for worker in workers if not worker.plan.helps],
        ended[outcome.failed.name] if outcome.failed else None,
        [ended[worker.name] for worker in outcome.unfinished if not worker.plan.helps],
    )


def _ended(worker: WorkerProcess, folder: str) -> Ended:
    result: shipping.Result | None = None
    with contextlib.suppress(FileNotFoundError), open(_result_path(folder, worker.plan), "rb") as file:
        result = pickle.load(file)
    tail, plan = worker.tail, worker.plan
    return Ended(plan.index, worker.exit_code, tail.lines(), result, tail.has_lost_another, plan.role)


def _result_path(folder: str, worker: WorkerPlan) -> str:
    return os.path.join(folder, f"result of {worker.name}")


def run_module(
    module: str, backend: str | None, num_workers: int, result: Path, *arguments: str
) -> dict[str, Any]:
    """Runs a module with `kdist run`, and returns the JSON content that it wrote to the file `result`.

    With 0 workers, runs it in a single process without the variables of a cluster.

    Raises:
        LaunchError: If the module fails. Its output has already been printed.
    """
    command, environment = [sys.executable], dict(os.environ)
    if num_workers:
        command += ["-m", "kdist", "run", "--num-workers", str(num_workers)]
        command += ["--backend", backend] if backend else []
    elif backend:
        environment["KERAS_BACKEND"] = backend
    command += ["-m", module, "--result", str(result), *arguments]
    code = subprocess.run(command, check=False, env=environment).returncode
    if code != 0:
        raise LaunchError(
            "The training run failed.",
            received={"exit_code": code},
            hint="Read the error of the worker above.",
        )
    return json.loads(result.read_text())
