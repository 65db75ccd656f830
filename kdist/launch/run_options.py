"""The options of `kdist run`, in groups, and the environment variables that they set."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from kdist.cluster import logs
from kdist.launch.options import BACKEND_HELP, ENV_HELP, environment_variables
from kdist.launch.role_supervisor import EVALUATOR_TIMEOUT, TASK_RESTARTS


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser."""
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument("--backend", help=BACKEND_HELP)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=ENV_HELP)
    _add_cluster(parser.add_argument_group("cluster"))
    _add_failures(parser.add_argument_group("failures"))
    _add_servers(parser.add_argument_group("parameter servers and evaluator"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir", metavar="DIR", help="also write the output of each worker to DIR/worker-I.log"
    )
    output.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="messages of kdist to show: debug, info, warning or error "
        "(default: KDIST_LOG, otherwise the job plan, missing workers, warnings and errors)",
    )
    testing = parser.add_argument_group("testing")
    testing.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the variables of each worker, without starting anything",
    )
    _accept(testing, "--dry_run", action="store_true")
    testing.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="make a worker fail on purpose, for example kill:worker=1,step=30; repeatable. Faults: kill, hang, "
        "freeze, slow, exit, sigterm, exception. Options: worker=, step=, epoch=, phase=, seconds=",
    )


class _Group(Protocol):
    """A group of options. The class of argparse is private."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Adds an option; see `argparse.ArgumentParser.add_argument`."""


def _accept(group: _Group, *names: str, **options: Any) -> None:
    """Accepts torchrun's spelling of an option, which the help does not list."""
    group.add_argument(*names, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)


def _add_cluster(group: _Group) -> None:
    group.add_argument(
        *("-n", "--num-workers", "--nproc-per-node"),
        dest="num_workers",
        default="auto",
        metavar="COUNT",
        help="workers on this machine, which share its GPUs evenly; auto starts one worker per GPU, or one worker if "
        "there is no GPU (default: auto)",
    )
    _accept(group, "--num_workers", "--nproc_per_node", dest="num_workers")
    group.add_argument(
        "--hosts",
        metavar="HOST:PORT,...",
        help="addresses of all machines, in the same order on each machine",
    )
    group.add_argument(
        "--host-index", type=int, metavar="INDEX", help="position of this machine in --hosts, starting at 0"
    )
    group.add_argument(
        "--join-timeout", metavar="SECONDS", help="time for all workers to join at startup (default: 300)"
    )


def _add_failures(group: _Group) -> None:
    group.add_argument(
        "--max-restarts",
        metavar="COUNT",
        help="restart the job up to COUNT times after a failure; with --num-ps, restart each failed worker instead "
        f"(default: 0, with --num-ps {TASK_RESTARTS})",
    )
    group.add_argument(
        "--min-workers",
        metavar="COUNT",
        help="if workers are lost, restart the job with the remaining workers, but with at least COUNT "
        "(default: never use fewer workers)",
    )
    group.add_argument(
        "--heartbeat-timeout",
        metavar="SECONDS",
        help="report a dead or stopped worker within SECONDS; on PyTorch, a stopped worker on another machine within "
        "4 times SECONDS (default: 15)",
    )
    group.add_argument(
        "--hang-timeout",
        metavar="SECONDS",
        help="terminate a worker that makes no progress for SECONDS while others wait for it (default: 600)",
    )
    group.add_argument(
        "--grace-period",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time for workers to exit after Ctrl-C or SIGTERM before they are killed (default: 5)",
    )


def _add_servers(group: _Group) -> None:
    group.add_argument(
        "--num-ps",
        default="0",
        metavar="COUNT",
        help="parameter servers to start, with a coordinator (default: 0)",
    )
    _accept(group, "--num_ps")
    group.add_argument(
        "--evaluator", action="store_true", help="also start an evaluator beside the training workers"
    )
    group.add_argument(
        "--evaluator-timeout",
        metavar="SECONDS",
        help=f"time for the evaluator to finish after training has ended (default: {EVALUATOR_TIMEOUT:g})",
    )


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that the options set in all tasks. Other options override `--env`.

    Raises:
        InvalidArgumentError: If a value of `--env` does not have the form NAME=VALUE.
    """
    variables = environment_variables(options.env)
    if options.backend:
        variables["KERAS_BACKEND"] = options.backend.lower()
    if options.log_level:
        variables[logs.VARIABLE] = options.log_level
    return variables
