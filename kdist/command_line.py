"""The command line: `kdist run`, `manifest`, `doctor`, `test`, `info`, `demo`, `checkpoint`, `bench`, `plot`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from kdist.checkpoint import command as checkpoint_command
from kdist.cluster import environment, logs
from kdist.doctor import command as doctor_command
from kdist.errors import ClusterConfigError, InvalidArgumentError, KdistError
from kdist.launch import restarts
from kdist.launch.info import print_info
from kdist.launch.manifest import command as manifest_command
from kdist.launch.options import target as read_target
from kdist.launch.options import whole_number
from kdist.launch.plan import check_backend, parse_hosts, resolve_num_workers
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

kdist COMMAND --help says more.
"""
_RUN_EXAMPLES = """examples:
  kdist run --num-workers 2 train.py --epochs 5
  kdist run -n auto --backend jax -m package.train
  kdist run -n 4 --max-restarts 3 --min-workers 2 train.py
  kdist run -n 2 --num-ps 2 --evaluator train.py
  kdist run -n 2 --inject kill:worker=1,step=30 train.py
  kdist run -n 1 --hosts host0:5000,host1:5000 --host-index 0 train.py
"""


class _Parser(argparse.ArgumentParser):
    """What all commands, and theirs, are made of: examples stay as they stand, and no option is guessed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kdist", description="Run a Keras script on several workers.", epilog=_EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"kdist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    doctor_command.add_to(commands)
    commands.add_parser("info", help="print what a bug report needs: versions, backend, devices, cluster")
    demo = commands.add_parser(
        "demo", help="train a small network on two workers and compare with one device"
    )
    demo.add_argument("--num-workers", "-n", type=int, default=2)
    demo.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    demo.add_argument("--epochs", type=int, default=8)
    checkpoint_command.add_to(commands)
    manifest_command.add_to(commands)
    measuring_command.add_to(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run a script in several worker processes",
        usage="kdist run [options] script.py [argument ...]\n"
        "       kdist run [options] -m module [argument ...]",
        epilog=_RUN_EXAMPLES,
    )
    names = ("-n", "--num-workers", "--num_workers", "--nproc-per-node", "--nproc_per_node")
    run.add_argument(
        *names,
        dest="num_workers",
        default="auto",
        metavar="N",
        help="workers of this machine, which share its GPUs evenly; auto (the default) is one a GPU, else one",
    )
    run.add_argument(
        "--num-ps",
        "--num_ps",
        default="0",
        metavar="M",
        help="parameter servers, which hold the variables; a coordinator is started too (default 0, none)",
    )
    run.add_argument(
        "--evaluator", action="store_true", help="also start an evaluator, a task beside those that train"
    )
    run.add_argument("--backend", help="tensorflow, jax or torch; by default what KERAS_BACKEND says")
    run.add_argument("--log-dir", metavar="DIR", help="also write each worker's output to DIR/worker-I.log")
    run.add_argument(
        "--hosts", metavar="HOST:PORT,...", help="all machines of the job, the same on each of them"
    )
    run.add_argument("--host-index", type=int, metavar="I", help="which of --hosts this machine is, from 0")
    run.add_argument(
        "--grace-period",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds that workers may take to end after Ctrl-C or SIGTERM (default 5)",
    )
    restarts.add_options(run)
    run.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="print what each worker would be told, and start nothing",
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    run.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit code: 0 for success, 2 for a wrong call, else that of the worker that failed first, or 128
        plus the number of its signal.

    Example:

    >>> from kdist.command_line import main
    >>> main(["run", "--num-workers", "2", "no-such-script.py"])
    2
    """
    options = build_parser().parse_args(argv)
    try:
        logs.set_up()
        if options.command == "run":
            return _run(options)
        if options.command == "info":
            return print_info()
        if options.command in ("doctor", "test"):
            return doctor_command.main(options)
        if options.command == "checkpoint":
            return checkpoint_command.main(options)
        if options.command == "manifest":
            return manifest_command.main(options)
        if options.command in ("bench", "plot"):
            return measuring_command.main(options)
        from kdist.demo import main as demo_main  # not on top: the demo needs NumPy, the launcher does not

        return demo_main(options.num_workers, options.backend, options.epochs)
    except KdistError as error:
        print(f"kdist {options.command}: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    command = _worker_command(options)
    check_backend(options.backend or environment.get("KERAS_BACKEND") or None)
    hosts = parse_hosts(options.hosts)
    if hosts and len(hosts) > 1 and options.host_index is None:
        raise InvalidArgumentError(
            "--hosts needs --host-index, which says which of them this machine is.",
            received={"hosts": hosts, "host_index": None},
            hint="On the first machine: --host-index 0",
        )
    if not options.grace_period >= 0:
        raise InvalidArgumentError(
            "--grace-period must not be negative.", received={"grace_period": options.grace_period}
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
    )
    return job.dry_run() if options.dry_run else job.run()


def _worker_command(options: argparse.Namespace) -> list[str]:
    target = read_target(options, "kdist run --num-workers 2 train.py")
    if options.module:
        _check_module(target[0])
        return [sys.executable, "-m", *target]
    if not os.path.isfile(target[0]):
        raise InvalidArgumentError(
            "The script must be a file that exists.",
            received={"script": target[0], "directory": os.getcwd()},
            hint="To run a module: kdist run -m package.module",
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
            "The module must exist.",
            received={"module": name},
            hint=f"Check with: {sys.executable} -m {name}",
        )


def _make_log_dir(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ClusterConfigError(
            "The log directory must be one that can be written.",
            received={"log_dir": path, "error": str(error)},
        ) from error
    return path
