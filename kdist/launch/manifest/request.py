"""The options of `kdist manifest` for all schedulers: workers, resources, restarts and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import PurePosixPath

from kdist.cluster import environment
from kdist.cluster.keras_backends import check_backend_name
from kdist.errors import InvalidArgumentError
from kdist.launch.options import ENV_HELP, environment_variables, target, whole_number

# A DNS label, because Kubernetes creates host names from it. Host names have at most 63 characters, and the
# index of the worker and a random suffix follow the name.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 52
_MEMORY = re.compile(r"([1-9][0-9]*)([MGT])i?")
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
CHECKPOINTS = "CHECKPOINT_DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The description of a job, independent of the scheduler."""

    num_workers: int
    command: tuple[str, ...]  # of each worker
    name: str
    cpus: int | None  # per worker; `None` for the scheduler's default, also below
    gpus: int  # per worker
    megabytes: int | None  # of memory per worker, in units of 2**20 bytes
    seconds: int | None  # the time limit of the job
    max_restarts: int  # after failures; preemptions do not count
    grace: int  # seconds between the signal to save a checkpoint and the end of a worker
    checkpoint_dir: str  # shared by all workers; scripts read it from `CHECKPOINT_DIR`
    variables: dict[str, str]


def add_options(parser: argparse.ArgumentParser, checkpoint_dir: str) -> None:
    """Adds the options for a `Request`. `checkpoint_dir` is the default of `--checkpoint-dir`."""
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="run a module instead of a script")
    add(
        "--backend",
        help="Keras backend: tensorflow, jax or torch (default: KERAS_BACKEND on this machine, or in the job)",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help=ENV_HELP)
    add("--output", metavar="FILE", help="write to FILE (default: print to stdout)")
    job = parser.add_argument_group("job")
    add = job.add_argument
    add("-n", "--num-workers", required=True, metavar="COUNT", help="number of workers in the job")
    add("--name", help="name of the job (default: the name of the script)")
    add("--time", metavar="[D-]HH:MM:SS", help="time limit of the job (default: set by the scheduler)")
    add("--cpus", metavar="COUNT", help="CPU cores per worker (default: set by the scheduler)")
    add("--gpus", default="0", metavar="COUNT", help="GPUs per worker (default: 0)")
    add("--memory", metavar="SIZE", help="memory per worker, for example 16G (default: set by the scheduler)")
    failures = parser.add_argument_group("failures")
    add = failures.add_argument
    add(
        "--max-restarts",
        default="3",
        metavar="COUNT",
        help="restart the job up to COUNT times after a failure; preemptions do not count (default: 3)",
    )
    add(
        "--grace-period",
        default="120",
        metavar="SECONDS",
        help="time to save a checkpoint before workers are killed (default: 120)",
    )
    add(
        "--checkpoint-dir",
        default=checkpoint_dir,
        metavar="DIR",
        help="directory that all workers share; scripts read it from the variable "
        f"{CHECKPOINTS} (default: {checkpoint_dir})",
    )
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def read_options(options: argparse.Namespace) -> Request:
    """Returns the request for the options of `add_options`.

    Raises:
        InvalidArgumentError: If an option is invalid.
        BackendError: If the backend is unknown. It need not be installed on this machine.
    """
    backend = options.backend or environment.get("KERAS_BACKEND") or None
    check_backend_name(backend)
    words = target(options, f"kdist manifest {options.scheduler} --num-workers 2 train.py")
    variables = {"PYTHONUNBUFFERED": "1", CHECKPOINTS: options.checkpoint_dir}
    if not options.checkpoint_dir.isprintable() or not options.checkpoint_dir:
        raise InvalidArgumentError(
            "--checkpoint-dir is not a path.",
            received={"checkpoint-dir": options.checkpoint_dir},
            hint="For example: --checkpoint-dir /checkpoints",
        )
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
        checkpoint_dir=options.checkpoint_dir,
        variables=variables | environment_variables(options.env),
    )


def _name(given: str | None, script: str, is_module: bool) -> str:
    name = given
    if name is None:
        stem = script if is_module else PurePosixPath(script).stem
        words = re.sub(r"[^a-z0-9]+", "-", stem.lower())
        name = words.lstrip("-0123456789")[:_LONGEST_NAME].rstrip("-") or "job"
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InvalidArgumentError(
            "--name is not a valid name for a job.",
            received={"name": name},
            hint=f"Use at most {_LONGEST_NAME} lowercase letters, digits and hyphens. Start with a letter, and do not "
            "end with a hyphen. For example: --name train-2",
        )
    return name


def _megabytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            "--memory is not a whole number of M, G or T.",
            received={"memory": text},
            hint="For example: --memory 16G",
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
            "--time is not a positive time in the form [D-]HH:MM:SS.",
            received={"time": text},
            hint="For a day and a half: --time 1-12:00:00",
        )
    return total
