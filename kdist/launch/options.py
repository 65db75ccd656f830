"""The options of `kdist run`, and help texts and checks of options that are common to several commands."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.cluster import logs, split_address, timeouts, visible_gpus
from kdist.errors import InvalidArgumentError
from kdist.launch.plan import EVALUATOR_TIMEOUT, TASK_RESTARTS

BACKEND_HELP = (
    "Keras backend: tensorflow, jax or torch (default: KERAS_BACKEND, then Keras's configuration file)"
)
ENV_HELP = "set an environment variable in all workers; repeatable"
# Torchrun's spellings of options, which the help does not list.
_HIDDEN: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
_PYTHON = re.compile(r"python[\d.]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def whole_number(name: str, text: str, least: int) -> int:
    """Parses an option whose value is a whole number.

    Raises:
        InvalidArgumentError: If the value is not a whole number, or less than `least`.

    Example:

    >>> from kdist.launch.options import whole_number
    >>> whole_number("--max-restarts", "3", least=0)
    3
    """
    if not (text.isascii() and text.isdigit() and least <= int(text[:9])):
        raise InvalidArgumentError(
            f"{name} is not a whole number of at least {least}.",
            received={name.lstrip("-"): text},
            hint=f"For example: {name} {max(least, 2)}",
        )
    return int(text[:9])


def is_variable(name: object, value: object) -> bool:
    """Returns whether a process can have this environment variable."""
    is_name = isinstance(name, str) and _VARIABLE.fullmatch(name) is not None
    return is_name and value is not None and "\0" not in str(value)


def environment_variables(entries: Sequence[str]) -> dict[str, str]:
    """Parses the values of `--env` into a dictionary.

    Raises:
        InvalidArgumentError: If an entry does not have the form NAME=VALUE.

    Example:

    >>> from kdist.launch.options import environment_variables
    >>> environment_variables(["A=1", "B="])
    {'A': '1', 'B': ''}
    """
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not is_variable(name, value):
            raise InvalidArgumentError(
                "The value of --env does not have the form NAME=VALUE.",
                received={"env": entry},
                hint="For example: --env OMP_NUM_THREADS=8",
            )
        variables[name] = value
    return variables


def target(options: argparse.Namespace, example: str) -> list[str]:
    """Returns the script (with `-m`, the module) and its arguments.

    Raises:
        InvalidArgumentError: If the script is missing, a notebook or Python itself. The message contains `example`.
    """
    rest = list(options.target)
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        raise InvalidArgumentError(
            "The script to run is missing.",
            received={"script": rest[0] if rest else None},
            hint=f"Pass a script after the options of kdist, for example: {example}",
        )
    if _PYTHON.fullmatch(os.path.basename(rest[0])):
        command = f"{example.partition(' --')[0]} {shlex.join(rest[1:]) or 'train.py'}"
        raise InvalidArgumentError(
            "The script to run is a Python interpreter, which kdist starts itself.",
            received={"script": rest[0]},
            hint=f"Pass only the script: {command}",
        )
    if rest[0].endswith(".ipynb"):  # Python reads most notebooks as one expression, without an error
        raise InvalidArgumentError(
            "The script to run is a notebook.",
            received={"script": rest[0]},
            hint=f"Convert it to a script first: jupyter nbconvert --to script {shlex.quote(rest[0])}",
        )
    option, equals, _ = (*rest, "")[1].partition("=")
    if is_auto(options.num_workers) and option in ("-n", "--num-workers", "--nproc-per-node"):
        logs.logger.warning(
            "the script gets the options after its name: %s\nIf they are for kdist, write: kdist run %s %s",
            *(" ".join(rest[1:]), " ".join(rest[1 : 2 if equals else 3]), rest[0]),
        )
    return rest


def is_auto(num_workers: str | int | None) -> bool:
    """Returns whether the number of workers depends on the available devices."""
    return num_workers is None or str(num_workers).strip().lower() == "auto"


def resolve_num_workers(text: str | int | None, environ: Mapping[str, str] | None = None) -> int:
    """Returns the number of workers for `--num-workers`. "auto" means one per GPU, or one if there is no GPU.

    Without GPUs, several workers share the cores of a machine, and are rarely faster than one worker.

    Raises:
        InvalidArgumentError: If the value is neither "auto" nor an integer from 1 to 10,000.

    Example:

    >>> from kdist.launch.options import resolve_num_workers
    >>> resolve_num_workers("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    3
    """
    if text is None or is_auto(text):
        return len(visible_gpus(environ)) or 1
    number = str(text).strip()
    if (
        isinstance(text, bool)
        or not (number.isascii() and number.isdigit())
        or not 1 <= int(number[:9]) <= 10_000
    ):
        raise InvalidArgumentError(
            'The number of workers is neither a positive integer nor "auto".',
            received={"num_workers": text},
            hint='Pass a number from 1 to 10000, or "auto".',
        )
    return int(number)


def parse_hosts(text: str | None) -> list[str]:
    """Parses the option `--hosts` into a list of addresses.

    Raises:
        ClusterConfigError: If an entry is not `host:port`.
        InvalidArgumentError: If an entry is repeated.

    Example:

    >>> from kdist.launch.options import parse_hosts
    >>> parse_hosts("host0:5000, host1:5000")
    ['host0:5000', 'host1:5000']
    """
    if not text:
        return []
    entries = [part.strip() for part in text.split(",")]
    for position, entry in enumerate(entries):
        split_address(entry, f"--hosts[{position}]")
    if len(set(entries)) != len(entries):
        raise InvalidArgumentError(
            "--hosts contains the same address twice.",
            received={"hosts": entries},
            hint="List each machine once, for example: --hosts host0:5000,host1:5000",
        )
    return entries


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kdist run` to its parser."""
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument("--backend", help=BACKEND_HELP)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=ENV_HELP)
    _add_cluster(parser)
    _add_failures(parser)
    _add_servers(parser)
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
    testing.add_argument("--dry_run", action="store_true", **_HIDDEN)
    testing.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="make a worker fail on purpose, for example kill:worker=1,step=30; repeatable. Faults: kill, hang, "
        "freeze, slow, exit, sigterm, exception. Options: worker=, step=, epoch=, phase=, seconds=, "
        "always=",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument(
        *("-n", "--num-workers", "--nproc-per-node"),
        dest="num_workers",
        default="auto",
        metavar="COUNT",
        help="workers on this machine, which share its GPUs evenly; auto starts one worker per GPU, or one worker if "
        "there is no GPU (default: auto)",
    )
    group.add_argument("--num_workers", "--nproc_per_node", dest="num_workers", **_HIDDEN)
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


def _add_failures(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("failures")
    group.add_argument(
        "--max-restarts",
        metavar="COUNT",
        help="restart the job up to COUNT times after a failure; with --num-ps, restart each failed worker instead "
        f"(default: 0; with --num-ps: {TASK_RESTARTS})",
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
        help="report a dead or stopped worker within SECONDS (default: 15)",
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


def _add_servers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parameter servers and evaluator")
    group.add_argument(
        "--num-ps",
        default="0",
        metavar="COUNT",
        help="parameter servers to start, with a coordinator (default: 0)",
    )
    group.add_argument("--num_ps", **_HIDDEN)
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
        InvalidArgumentError: If an option is invalid.
    """
    variables = environment_variables(options.env)
    if options.backend:
        variables["KERAS_BACKEND"] = options.backend.lower()
    if options.log_level:
        variables[logs.VARIABLE] = options.log_level
    for option, variable, text in (
        ("--heartbeat-timeout", timeouts.HEARTBEAT_VARIABLE, options.heartbeat_timeout),
        ("--hang-timeout", timeouts.HANG_VARIABLE, options.hang_timeout),
        ("--join-timeout", timeouts.JOIN_VARIABLE, options.join_timeout),
    ):
        if text is not None:
            variables[variable] = f"{timeouts.parse_seconds(text, option):g}"
    return variables
