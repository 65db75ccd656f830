"""The options and the output of `kdist doctor` and `kdist test`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from collections.abc import Callable, Sequence

from kdist.cluster import Cluster, discover, environment, keras_backend_name
from kdist.cluster.keras_backends import check_backend_name, installed_backends
from kdist.doctor.examination import Options, examine
from kdist.doctor.local_workers import examine_here, hidden_gpus, one_device
from kdist.doctor.report import FAIL, OK, WARN, Line, Report
from kdist.errors import BackendError, ClusterConfigError, InvalidArgumentError, KdistError
from kdist.launch.info import version_of
from kdist.launch.options import BACKEND_HELP, whole_number

_TIMEOUT = 120.0
_ALL_BACKENDS_HELP = "Keras backend: tensorflow, jax or torch (default: all installed backends)"
_EXAMPLES = """examples:
  kdist doctor
  kdist doctor -n 4 --backend jax --shared /data/checkpoints
  torchrun --nproc-per-node 2 -m kdist doctor
  srun -N 2 python -m kdist doctor
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check all workers for problems that would stop or slow a job, and suggest fixes",
        epilog=_EXAMPLES,
    )
    doctor.add_argument(
        "--shared", metavar="DIR", help="also check that all workers can write to and read from DIR"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    test = commands.add_parser(
        "test",
        help="run kdist doctor, and compare one training step with one device, on each backend",
    )
    for command, backend in ((doctor, BACKEND_HELP), (test, _ALL_BACKENDS_HELP)):
        command.add_argument(
            "-n",
            "--num-workers",
            metavar="COUNT",
            help="workers to start on this machine if no cluster is configured (default: 2)",
        )
        command.add_argument("--backend", help=backend)
        command.add_argument(
            "--timeout",
            type=float,
            default=_TIMEOUT,
            metavar="SECONDS",
            help=f"print an incomplete report and exit after SECONDS (default: {_TIMEOUT:g})",
        )


def main(options: argparse.Namespace) -> int:
    """Runs one of the commands. Returns the exit code, which is 1 if a check failed.

    Raises:
        KdistError: If an option is invalid.
    """
    if not 1 <= options.timeout < 1e6:
        raise InvalidArgumentError(
            "--timeout is not between 1 and 1000000 seconds.",
            received={"timeout": options.timeout},
            hint="Pass a number of seconds, for example: --timeout 120",
        )
    check_backend_name(options.backend)
    options.backend = options.backend and options.backend.lower()
    cluster = _cluster()
    is_launched = cluster is None or cluster.num_workers > 1
    if is_launched and options.num_workers is not None:
        raise InvalidArgumentError(
            "--num-workers cannot be used, because a cluster is configured here.",
            received={"num_workers": options.num_workers},
            hint="Omit --num-workers. To see the configuration of the cluster, run: kdist info",
        )
    least = 2 if options.command == "test" else 1
    count = whole_number("--num-workers", options.num_workers or "2", least)
    if options.command == "test":
        is_chief = not is_launched or (cluster is not None and cluster.is_chief)
        return _test(options, count, is_launched, is_chief)

    def show(report: Report) -> None:
        following = _next(report, is_launched, "kdist test")
        if options.json:
            print(json.dumps(report.as_json() | {"next": following}, indent=2), flush=True)
        else:
            print(f"{report.text()}\nnext: {following}", flush=True)

    asked = Options(options.timeout, options.shared)
    return _examined(asked, options.backend, count, is_launched, show)


def _cluster() -> Cluster | None:
    """Returns the cluster, or `None` if its description is invalid, which a check reports later."""
    try:
        return discover()
    except ClusterConfigError:
        return None


def _examined(
    asked: Options, backend: str | None, count: int, is_launched: bool, show: Callable[[Report], None]
) -> int:
    """Checks workers on this machine, or the workers of the job that includes this process."""
    if not is_launched:
        report = examine_here(asked, count, backend)
        show(report)
        return report.exit_code

    def say(report: Report) -> None:
        # A worker that did not join the chief prints its own report.
        if not report.joined or discover().is_chief:
            show(report)

    with environment.patched(KERAS_BACKEND=backend or keras_backend_name()):
        return examine(asked, say).exit_code


def _next(report: Report, is_launched: bool, when_well: str) -> str:
    if is_launched and not report.failed:
        return "start your script in place of kdist doctor"
    return report.next_command(when_well, "fix the failed checks, then: kdist doctor")


def _test(options: argparse.Namespace, count: int, is_launched: bool, is_chief: bool) -> int:
    """Checks each backend and prints a table. Returns the exit code."""
    named = options.backend or (keras_backend_name() if is_launched else None)
    backends = [named] if named else installed_backends()
    if not backends:
        raise BackendError(
            "No Keras backend is installed.",
            hint="In your checkout of kdist, run: pip install '.[jax]' (or '.[torch]' or '.[tensorflow]')",
        )
    shown: list[tuple[str, Report]] = []
    codes = []
    for backend in backends:

        def show(report: Report, backend: str = backend) -> None:
            shown.append((backend, report))
            print(f"{report.text()}\n", flush=True)
            if backend == backends[-1]:
                print(_table(shown), flush=True)
                worst = next((report for _, report in shown if report.failed), report)
                following = _next(worst, is_launched, f"kdist run --num-workers {count} train.py")
                print(f"next: {following}", flush=True)

        asked, broken = Options(options.timeout, trains=True), None
        if is_chief:
            asked, broken = _with_one_device(asked, backend, 1 if is_launched else count)
        if broken is not None:
            show(broken)
        codes.append(1 if broken else _examined(asked, backend, count, is_launched, show))
    return max(codes)


def _with_one_device(asked: Options, backend: str, count: int) -> tuple[Options, Report | None]:
    """Trains the small model on one device. Returns the options with the result, and a report on failure."""
    try:
        expected = one_device(backend, asked.timeout, hidden_gpus(count))
        return dataclasses.replace(asked, expected=expected), None
    except KdistError as error:
        command = f"kdist doctor --backend {backend}"
        line = Line(FAIL, "one device", str(error), "See the details", command)
        return asked, Report(f"one device on {backend}", [line])


def _table(shown: Sequence[tuple[str, Report]]) -> str:
    """Returns the last lines of `kdist test`, with the result of each backend."""
    rows = [("backend", "version", "checks", "one step", "result")]
    for backend, report in shown:
        counts = collections.Counter(line.status for line in report.lines)
        checks = ", ".join(f"{counts[status]} {status}" for status in (OK, WARN, FAIL) if counts[status])
        step = next((line for line in report.lines if line.check == "one step"), None)
        agrees = "not run" if step is None else "matches" if step.status == OK else "differs"
        rows.append((backend, version_of(backend), checks, agrees, FAIL if report.failed else OK))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
