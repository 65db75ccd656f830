"""What a manifest is to say, whatever schedules it: the workers, their share of a machine, restarts."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from kdist.cluster import environment
from kdist.errors import InvalidArgumentError
from kdist.launch.options import target, whole_number
from kdist.launch.plan import check_backend_name

# A label of DNS: Kubernetes makes host names of it.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = (
    52  # a host name has 63 characters at most, and the worker's number and a random end come after it
)
_MEMORY = re.compile(r"([1-9][0-9]*)([MGT])i?")
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CHECKPOINTS = "CHECKPOINT_DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A job that is to be written down.

    Args:
        num_workers: How many workers.
        command: What each of them runs.
        name: Of the job.
        cpus: How many cores a worker gets; `None` leaves it to the scheduler.
        gpus: How many GPUs a worker gets.
        megabytes: How much memory a worker gets, in units of 2**20 bytes; `None` leaves it to the scheduler.
        seconds: How long the job may run; `None` for no limit of its own.
        max_restarts: How often it is started again after a failure. A preemption does not count.
        grace: How many seconds before its end a worker is told to save.
        checkpoint_dir: A directory that all workers share; the script finds it in `CHECKPOINT_DIR`.
        variables: The workers' environment.
    """

    num_workers: int
    command: tuple[str, ...]
    name: str
    cpus: int | None
    gpus: int
    megabytes: int | None
    seconds: int | None
    max_restarts: int
    grace: int
    checkpoint_dir: str
    variables: dict[str, str]


def add_options(parser: argparse.ArgumentParser, checkpoint_dir: str) -> None:
    """Adds the options that a `Request` consists of; `checkpoint_dir` is the default of that one."""
    add = parser.add_argument
    add("-n", "--num-workers", required=True, metavar="N", help="how many workers the job has")
    add("--name", help="of the job; by default that of the script")
    add("--backend", help="tensorflow, jax or torch; by default what KERAS_BACKEND says, here or in the job")
    add("--cpus", metavar="C", help="cores of a worker")
    add("--gpus", default="0", metavar="G", help="GPUs of a worker (default 0)")
    add("--memory", metavar="M", help="memory of a worker, such as 16G")
    add("--time", metavar="[D-]HH:MM:SS", help="how long the job may run")
    add(
        "--max-restarts",
        default="3",
        metavar="R",
        help="start the whole job again after a failure, so many times (default 3); a preemption does not count",
    )
    add(
        "--grace-period",
        default="120",
        metavar="S",
        help="seconds that workers have for a checkpoint before they are ended (default 120)",
    )
    add(
        "--checkpoint-dir",
        default=checkpoint_dir,
        metavar="DIR",
        help=f"a directory of all workers, which the script finds in {CHECKPOINTS} (default {checkpoint_dir})",
    )
    add(
        "--env", action="append", default=[], metavar="K=V", help="a variable of the workers; may be repeated"
    )
    add("--output", metavar="FILE", help="write the manifest there instead of printing it")
    add("-m", dest="module", action="store_true", help="run a module instead of a script")
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def read_options(options: argparse.Namespace) -> Request:
    """Checks the options that `add_options` has added.

    Raises:
        InvalidArgumentError: If one of them cannot be.
        BackendError: If the backend is unknown. It need not be installed here.
    """
    backend = options.backend or environment.get("KERAS_BACKEND") or None
    check_backend_name(backend)
    words = target(options, f"kdist manifest {options.scheduler} --num-workers 2 train.py")
    variables = {"PYTHONUNBUFFERED": "1", CHECKPOINTS: options.checkpoint_dir}
    if backend:
        variables["KERAS_BACKEND"] = backend.lower()
    return Request(
        num_workers=whole_number("--num-workers", options.num_workers, 1),
        command=("python", *(["-m"] if options.module else []), *words),
        name=_name(options.name, words[0], options.module),
        cpus=None if options.cpus is None else whole_number("--cpus", options.cpus, 1),
        gpus=whole_number("--gpus", options.gpus, 0),
        megabytes=_megabytes(options.memory),
        seconds=_seconds(options.time),
        max_restarts=whole_number("--max-restarts", options.max_restarts, 0),
        grace=whole_number("--grace-period", options.grace_period, 1),
        checkpoint_dir=_one_line("--checkpoint-dir", options.checkpoint_dir),
        variables=variables | _variables(options.env),
    )


def _name(given: str | None, script: str, is_module: bool) -> str:
    name = given
    if name is None:
        stem = script if is_module else PurePosixPath(script).stem
        words = re.sub(r"[^a-z0-9]+", "-", stem.lower())
        name = words.lstrip("-0123456789")[:_LONGEST_NAME].rstrip("-") or "job"
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InvalidArgumentError(
            "The name of a job consists of small letters, digits and hyphens, begins with a letter, does not end with "
            f"a hyphen, and has {_LONGEST_NAME} characters at most.",
            received={"name": name},
            hint="For example: --name train-2",
        )
    return name


def _megabytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            "--memory must be a whole number of M, G or T.", received={"memory": text}, hint="--memory 16G"
        )
    return int(match[1]) * {"M": 1, "G": 2**10, "T": 2**20}[match[2]]


def _seconds(text: str | None) -> int | None:
    if text is None:
        return None
    match = _TIME.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InvalidArgumentError(
            "--time must have the form [D-]HH:MM:SS, and be more than none.",
            received={"time": text},
            hint="For a day and a half: --time 1-12:00:00",
        )
    return total


def _variables(entries: Sequence[str]) -> dict[str, str]:
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
            raise InvalidArgumentError(
                "--env must have the form NAME=VALUE.",
                received={"env": entry},
                hint="For example: --env OMP_NUM_THREADS=8",
            )
        variables[name] = value
    return variables


def _one_line(option: str, text: str) -> str:
    if not text or not text.isprintable():
        raise InvalidArgumentError(f"{option} must be a path.", received={option.lstrip("-"): text})
    return text
