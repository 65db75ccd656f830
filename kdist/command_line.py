"""The command `kdist`: `run`, `demo`, `doctor`, `test`, `info`, `bench`, `plot`, `checkpoint`, `manifest`."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kdist.checkpoint import command as checkpoint_command
from kdist.cluster import environment, logs, timeouts
from kdist.cluster.keras_backends import BACKENDS, check_backend
from kdist.doctor import command as doctor_command
from kdist.errors import ClusterConfigError, InvalidArgumentError, KdistError
from kdist.launch import manifest, restarts
from kdist.launch.info import print_info
from kdist.launch.options import (
    BACKEND_HELP,
    add_run_options,
    parse_hosts,
    resolve_num_workers,
    variables_of,
    whole_number,
)
from kdist.launch.options import target as read_target
from kdist.launch.restarts import Job
from kdist.measuring import command as measuring_command
from kdist.version import __version__

_EXAMPLES = """examples:
  kdist demo
  kdist run -n 2 train.py
  kdist bench -n 1,2
  kdist plot runs/first
  kdist manifest kubernetes -n 4 --gpus 1 --image registry/train:1 train.py | kubectl apply -f -
  kdist manifest slurm -n 4 --gpus 1 --output train.sh train.py && sbatch train.sh

For the options of a command: kdist COMMAND --help
"""
_RUN_EXAMPLES = f"""examples:
  kdist run --num-workers 2 train.py --epochs 5
  kdist run -n auto --backend jax -m package.train
  kdist run -n 4 --max-restarts 3 --min-workers 2 train.py
  kdist run -n 2 --num-ps 2 --evaluator train.py
  kdist run -n 2 --inject kill:worker=1,step=30 train.py
  kdist run -n 1 --hosts host0:5000,host1:5000 --host-index 0 train.py

exit codes:
  0      all workers succeeded
  2      invalid command, for example an unknown option or backend, or a missing script
  {timeouts.STALLED}     a worker hung and was terminated
  {timeouts.PREEMPTED}     the job was preempted after saving a checkpoint; start it again
  128+n  a worker or the launcher was terminated by signal n (130 Ctrl-C, 137 SIGKILL, 143 SIGTERM)
  other  the exit code of the worker that failed first
"""


_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
# Names of options in other launchers, such as torchrun.
_OTHER_NAMES = {"--nnodes": "--hosts", "--node-rank": "--host-index", "--node_rank": "--host-index"}


class _Parser(argparse.ArgumentParser):
    """Parses commands and subcommands. Keeps the line breaks of examples, and rejects abbreviated options.

    Each subcommand reports its errors itself, with its usage and the nearest option or choice.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; an unknown argument is an error of this parser, not of its parent."""
        self._words = [word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            if option is None:
                self._fail(f"unexpected argument: {unknown[0]}")
            self._fail(f"unknown option: {option}", self._nearest_option(option))
        return found, []

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, suggests the nearest option or choice, and exits with code 2."""
        if self._subparsers and not self._words:
            self.print_help(sys.stderr)
            self.exit(2)
        if self._subparsers and "required: " in message:  # a command; so no option before it is known
            self._fail(f"unknown option: {self._words[0]}", self._nearest_option(self._words[0]))
        if choice := _INVALID_CHOICE.search(message):
            self._fail(message, *difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), 1))
        for word in self._words:  # a required option may be missing because it is misspelled
            nearest = self._nearest_option(word) if word.startswith("--") else ""
            if nearest and nearest != word and re.search(rf"required:.*{nearest}\b", message):
                self._fail(message, f"{nearest} instead of {word}")
        self._fail(message)

    def _fail(self, message: str, nearest: str = "") -> NoReturn:
        self.print_usage(sys.stderr)
        hint = f"Did you mean {nearest}?" if nearest else f"For help, run: {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}\n{hint}\n")

    def _nearest_option(self, option: str) -> str:
        """Returns the option that the user may have meant, or an empty string."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        known = [name for action in shown for name in action.option_strings if name.startswith("--")]
        renamed = [name for name in known if name == _OTHER_NAMES.get(option)]
        longer = [name for name in known if len(option) > 3 and name.startswith(option)]
        return next(iter([*renamed, *longer, *difflib.get_close_matches(option, known, 1)]), "")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kdist", description="Train Keras models on several devices and machines.", epilog=_EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"kdist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_demo(commands)
    doctor_command.add_to(commands)
    commands.add_parser("info", help="print versions, backend, devices and cluster sources for a bug report")
    measuring_command.add_to(commands)
    checkpoint_command.add_to(commands)
    manifest.add_to(commands)
    # argparse shows a command's help only in the list of commands.
    for listed in vars(commands)["_choices_actions"]:
        text = listed.help or ""
        commands.choices[listed.dest.split()[0]].description = f"{text[:1].upper()}{text[1:]}."
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo", help="train a small network on one device and on two workers, and compare the results"
    )
    demo.add_argument(
        "-n", "--num-workers", default="2", metavar="COUNT", help="number of workers (default: 2)"
    )
    demo.add_argument("--backend", choices=BACKENDS, metavar="BACKEND", help=BACKEND_HELP)
    demo.add_argument("--epochs", default="8", metavar="COUNT", help="number of epochs to train (default: 8)")


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        aliases=["launch"],
        help="run a script on several workers",
        usage="kdist run [options] script.py [argument ...]\n"
        "       kdist run [options] -m module [argument ...]",
        epilog=_RUN_EXAMPLES,
    )
    add_run_options(run)
    run.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; by default the arguments of the process.

    Returns:
        The exit code: 0 for success, and 2 for invalid arguments. Otherwise, the exit code of the worker that
        failed first, or 128 plus the number of its signal.

    Example:

    >>> from kdist.command_line import main
    >>> main(["run", "--num-workers", "2", "no-such-script.py"])
    2
    """
    options = build_parser().parse_args(argv)
    # Not all terminals show "×" or "…". A manifest must not contain other characters instead.
    if isinstance(sys.stdout, io.TextIOWrapper) and options.command != "manifest":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        logs.set_up()
        if options.command in ("run", "launch"):
            return _run(options)
        if options.command == "info":
            return print_info()
        if options.command in ("doctor", "test"):
            return doctor_command.main(options)
        if options.command == "checkpoint":
            return checkpoint_command.main(options)
        if options.command == "manifest":
            return manifest.main(options)
        if options.command in ("bench", "plot"):
            return measuring_command.main(options)
        from kdist.demo import main as demo_main  # needs NumPy, unlike the launcher

        num_workers = whole_number("--num-workers", options.num_workers, 1)
        return demo_main(num_workers, options.backend, whole_number("--epochs", options.epochs, 1))
    except KdistError as error:
        print(f"kdist {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, for example `head`, has read enough. Python would fail again when it flushes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # for example without free file descriptors, or in a deleted directory
        logs.logger.debug("The error in full:", exc_info=True)
        print(f"kdist {options.command}: The operating system reports an error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    variables = variables_of(options)
    logs.set_up({logs.VARIABLE: variables.get(logs.VARIABLE, "")})
    command = _worker_command(options)
    check_backend(variables.get("KERAS_BACKEND") or environment.get("KERAS_BACKEND") or None)
    hosts = parse_hosts(options.hosts)
    if hosts and len(hosts) > 1 and options.host_index is None:
        raise InvalidArgumentError(
            "--host-index is missing, because --hosts lists several machines.",
            received={"hosts": hosts, "host_index": None},
            hint="Pass the position of this machine in --hosts. On the first machine: --host-index 0",
        )
    if options.host_index and not hosts:
        raise InvalidArgumentError(
            "--hosts is missing, because --host-index is not 0.",
            received={"host_index": options.host_index},
            hint="Pass the addresses of all machines, for example: --hosts host0:5000,host1:5000",
        )
    if not options.grace_period >= 0:
        raise InvalidArgumentError(
            "--grace-period is not a number of at least 0.",
            received={"grace_period": options.grace_period},
            hint="For example: --grace-period 30",
        )
    count = resolve_num_workers(options.num_workers)
    num_ps = whole_number("--num-ps", options.num_ps, 0)
    policy = restarts.read_options(options, count, hosts, num_ps)
    job = Job(
        command=command,
        local_workers=count,
        num_ps=num_ps,
        evaluator=options.evaluator,
        hosts=hosts,
        host_index=options.host_index or 0,
        backend=options.backend,
        log_dir=options.log_dir if options.dry_run else _make_log_dir(options.log_dir),
        grace=options.grace_period,
        policy=policy,
        asked=options.num_workers,
        variables=variables,
    )
    return job.dry_run() if options.dry_run else job.run()


def _worker_command(options: argparse.Namespace) -> list[str]:
    target = read_target(options, "kdist run --num-workers 2 train.py")
    if options.module:
        _check_module(target[0])
        return [sys.executable, "-m", *target]
    if not os.path.isfile(target[0]):
        raise InvalidArgumentError(
            f"The script {target[0]!r} {'is not a file' if os.path.exists(target[0]) else 'does not exist'}.",
            received={"directory": os.getcwd()},
            hint="Check the path. To run a module: kdist run -m package.module",
        )
    return [sys.executable, *target]


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        found = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise InvalidArgumentError(
            f"The module {name!r} was not found.",
            received={"directory": os.getcwd()},
            hint="Run the command in the directory that contains the module, or install its package.",
        )


def _make_log_dir(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ClusterConfigError(
            f"Cannot create the log directory {path!r}.",
            received={"error": str(error)},
            hint="Choose another directory with --log-dir.",
        ) from error
    return path
