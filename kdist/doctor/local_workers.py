"""Starts workers on this machine for the checks, if no cluster is configured."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist.cluster import environment, visible_gpus
from kdist.doctor.examination import Options, examine
from kdist.doctor.probes import train_it
from kdist.doctor.report import FAIL, WARN, Line, Report
from kdist.errors import LaunchError
from kdist.launch import report as exits
from kdist.launch import shipping
from kdist.launch.local_workers import run_plan
from kdist.launch.output import Sink
from kdist.launch.plan import GPUS, NO_GPU, plan_job
from kdist.launch.shipping import Ending
from kdist.parity import Training
from kdist.whole_files import whole_file

_LATER = 15.0  # seconds after the timeout until the launcher terminates workers that did not exit


def examine_here(options: Options, num_workers: int, backend: str | None) -> Report:
    """Starts workers on this machine, and returns their combined report."""
    options = dataclasses.replace(options, started_by="started on this machine")
    with tempfile.TemporaryDirectory(prefix="kdist-doctor-") as folder:
        limit, hidden = options.timeout + _LATER, hidden_gpus(num_workers)
        ending = _quietly(_in_worker, (options, folder), num_workers, backend, limit, hidden)
        found = {
            int(path.stem): Report.from_json(path.read_text("utf-8")) for path in Path(folder).glob("*.json")
        }
    report = together([found.get(index) for index in range(num_workers)], ending)
    if hidden:
        gpus = len(visible_gpus())
        says = f"fewer GPUs ({gpus}) than workers ({num_workers}), so the workers use the CPU"
        line = Line(WARN, "devices", says, "Start one worker per GPU", f"kdist doctor -n {gpus}")
        report.lines.insert(0, line)
    return report


def hidden_gpus(num_workers: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns variables that hide the GPUs if there are fewer GPUs than workers, which cannot share a GPU."""
    return {GPUS: NO_GPU} if 0 < len(visible_gpus(environ)) < num_workers else {}


def one_device(backend: str | None, timeout: float, hidden: Mapping[str, str]) -> Training:
    """Trains the small model for one step on one device, in a separate process.

    `hidden` are variables that hide the GPUs, if the workers do not use GPUs either.

    Raises:
        LaunchError: If the training fails.
    """
    ending = _quietly(train_it, (None,), 1, backend, timeout, hidden)
    (worker,) = ending.workers
    if worker.result is not None and worker.result.ok:
        return worker.result.value()
    late = f"No result within {timeout:g} s. " if ending.unfinished else ""
    said = worker.result.summary if worker.result else " ".join(exits.last_traceback(worker.lines, 8))
    raise LaunchError(
        f"Plain Keras failed to train on one device. {late}{said}",
        received={"backend": backend},
        hint="Check that Keras can train a model with this backend.",
    )


def _quietly(
    fn: Callable[..., Any],
    args: Sequence[Any],
    num_workers: int,
    backend: str | None,
    timeout: float,
    hidden: Mapping[str, str],
) -> Ending:
    plan = plan_job(num_workers, backend=backend, extra=hidden, creates_secret=False)
    payload = shipping.pack_call(fn, args, {}, sys.path)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        quiet = Sink(nowhere)  # the returned `Ending` contains the last output of the workers
        return run_plan(plan, payload, quiet, quiet, timeout=timeout, prefixed=False)


def _in_worker(options: Options, folder: str) -> None:
    index = environment.get("RANK")

    def deliver(report: Report) -> None:
        with whole_file(Path(folder, f"{index}.json")) as file:
            file.write(json.dumps(report.as_json()).encode())

    report = examine(options, deliver)
    if not report.joined:
        raise SystemExit(1)  # so that the other workers do not wait for this one


def together(reports: Sequence[Report | None], ending: Ending) -> Report:
    """Combines the reports of all workers. Missing reports are `None`."""
    there = [report for report in reports if report is not None]
    # All joined workers report the shared checks. The report of the chief, the first one, contains all lines.
    for report in there:
        if report.joined:
            return report
    whole = there[0] if there else Report("no worker has responded")
    for report in there[1:]:
        whole.lines += [line for line in report.failed if line not in whole.lines]
    failed = ending.failed
    if failed is not None and reports[failed.index] is None:
        last = exits.last_traceback(failed.lines, 8)
        says = f"{failed.name} {exits.describe_exit(failed.exit_code or 0)}: {' '.join(last)}"
        whole.lines.append(
            Line(FAIL, "workers", says, "See its whole output", "kdist run -n 1 -m kdist doctor")
        )
    for late in ending.unfinished:
        stack = "Its stack: " + " ".join(shipping.last_stacks(late.lines))
        whole.lines.append(Line(FAIL, "workers", f"{late.name} did not exit", stack))
    return whole
