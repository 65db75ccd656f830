"""Checks one worker, first separately, then together with the other workers. It always ends in time."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kdist.cluster import Cluster, discover, environment
from kdist.doctor import probes
from kdist.doctor.facts import Facts, gather, reach
from kdist.doctor.machines import judge_all_reduce, judge_clocks, judge_machines, judge_shared
from kdist.doctor.report import FAIL, OK, Line, Report
from kdist.doctor.software import judge_software
from kdist.errors import KdistError, WorkerLostError, WorkerTimeoutError
from kdist.parity import Training

_LAST = 5.0  # seconds that a process has to report after the timeout
_BETWEEN = (
    "The workers reach worker 0, but not each other. Open all ports between the machines, or set the interface",
    "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
)
_LONGER = ("If the worker only needs more time, wait longer", "kdist doctor --timeout 600")
_HINTS = {
    "all-reduce": _BETWEEN,
    "clocks": _BETWEEN,
    "joining": (
        "Start the missing workers and read their output, or wait longer",
        "kdist doctor --timeout 600",
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the checks."""

    timeout: float  # for all checks together, in seconds
    shared: str | None = None  # a directory that should be shared by all workers
    started_by: str | None = None  # for the title; by default the source of the cluster
    trains: bool = False  # whether to compare one training step of a small model with one device
    expected: Training | None = None  # the result on one device; `None` on workers that do not compare


def examine(options: Options, deliver: Callable[[Report], None]) -> Report:
    """Checks this process and, together with the other workers, its cluster.

    Calls `deliver` once with the report, at the end or at the timeout. At a timeout, the process exits.
    """
    ends = time.monotonic() + options.timeout
    report = Report()
    stage = ["cluster"]
    once = threading.Lock()

    def late() -> None:
        if once.acquire(blocking=False):
            remedy, command = _HINTS.get(stage[0], _LONGER)
            says = f"not finished within {options.timeout:g} s"
            report.lines.append(Line(FAIL, stage[0], says, remedy, command))
            deliver(report)
            os._exit(report.exit_code)

    timer = threading.Timer(options.timeout, late)
    timer.daemon = True
    timer.start()
    # If Python itself hangs, for example in a C call that holds the GIL, the timer cannot run.
    faulthandler.dump_traceback_later(options.timeout + _LAST, exit=True)
    try:
        for stage[0] in _stages(options, report, ends):
            pass
    except Exception as error:
        report.lines.append(failed_line(stage[0], error))
    if not once.acquire(blocking=False):
        threading.Event().wait()  # the timer thread terminates the process
    timer.cancel()
    faulthandler.cancel_dump_traceback_later()
    deliver(report)
    return report


def failed_line(stage: str, error: Exception) -> Line:
    """Returns the report line for a stage that raised an error.

    Errors of kdist already contain advice. If a backend fails, or a worker is lost after it joined, the most
    likely cause is the network between the workers.
    """
    says_what_to_do = isinstance(error, KdistError) and not isinstance(error, WorkerLostError)
    advice = ("", "") if says_what_to_do or stage not in _HINTS else _BETWEEN
    return Line(FAIL, stage, _said(error), *advice)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KdistError) else f"{type(error).__name__}: {error}"


def _stages(options: Options, report: Report, ends: float) -> Iterator[str]:
    """Runs the stages in order, and yields the name of the next stage before it starts."""
    cluster = discover()
    facts = gather(cluster)
    workers = f"{cluster.num_workers} worker{'s' * (cluster.num_workers > 1)}"
    started_by = options.started_by or f"cluster from {cluster.source}"
    report.title = f"{workers} on {facts.backend[0]}, {started_by}"
    report.lines = [*judge_software([facts]), *judge_machines([facts])]
    yield "import"
    if problem := _import_problem():
        facts = dataclasses.replace(facts, import_error=problem)
        report.lines = [*judge_software([facts]), *judge_machines([facts])]
        return
    import kdist

    yield "joining"
    start = time.monotonic()
    try:
        with environment.patched(KDIST_JOIN_TIMEOUT=max(1, int(ends - time.monotonic() - _LAST))):
            strategy = kdist.MultiWorkerMirroredStrategy()
    except WorkerTimeoutError as error:
        report.lines.append(missing_line(cluster, error))
        return
    # The devices are only read after joining, because the backend must not be initialized earlier.
    devices = tuple(strategy.runtime.devices)
    facts = dataclasses.replace(
        facts, devices=devices, accelerators=sum(not name.startswith("cpu") for name in devices)
    )
    yield from _together(options, report, cluster, facts, strategy, time.monotonic() - start)


def missing_line(cluster: Cluster, error: WorkerTimeoutError) -> Line:
    """Returns the report line for missing workers. Workers also try to connect to the chief."""
    says = " ".join([error.problem, "" if cluster.is_chief else reach(cluster.coordinator)]).rstrip()
    return Line(FAIL, "joining", says, *_HINTS["joining"])


def _import_problem() -> str:
    """Imports Keras and its backend. Returns the problem, or "" if the import works."""
    try:
        from kdist.backends import get_backend

        get_backend()
    except Exception as error:  # a broken installation may raise anything
        return next(iter(_said(error).splitlines()), type(error).__name__)
    return ""


def _together(
    options: Options, report: Report, cluster: Cluster, facts: Facts, strategy: Any, joining: float
) -> Iterator[str]:
    import kdist

    def exchange(value: Any) -> list[Any]:
        return kdist.all_gather_object(value, strategy)

    everyone = [facts.of_another(text) for text in exchange(json.dumps(dataclasses.asdict(facts)))]
    report.joined = True
    report.lines = [*judge_software(everyone), *judge_machines(everyone)]
    if cluster.num_workers > 1:
        report.lines.append(
            Line(OK, "joining", f"all {cluster.num_workers} workers joined within {joining:.1f} s")
        )
    if len({one.versions.get("kdist") for one in everyone}) > 1:
        return  # other versions may exchange different messages
    yield "clocks"
    report.lines.append(judge_clocks(probes.clock_offsets(exchange)))
    if options.shared is not None:
        yield "shared"
        problems = probes.shared_folder(options.shared, cluster.worker_index, exchange)
        report.lines.append(judge_shared(options.shared, problems))
    yield "all-reduce"
    report.lines.append(judge_all_reduce(*probes.all_reduce_times(strategy)))
    if options.trains:
        yield "one step"
        line = probes.compare_step(options.expected, strategy, exchange)
        report.lines += [line] if line else []
    kdist.barrier("kdist doctor has finished", strategy=strategy)
