"""`kdist manifest`: generates the description of a job for Kubernetes or Slurm, without starting it.

`request.py` contains the common options. `kubernetes.py` and `slurm.py` write the description.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

from kdist.errors import InvalidArgumentError
from kdist.launch.manifest import kubernetes, request, slurm

_EXAMPLES = """examples:
  kdist manifest kubernetes -n 4 --gpus 1 --image registry/train:1 train.py --epochs 5 | kubectl apply -f -
  kdist manifest slurm -n 4 --gpus 1 --time 12:00:00 --output train.sh train.py && sbatch train.sh
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    manifest = commands.add_parser(
        "manifest",
        help="generate a Kubernetes manifest or a Slurm script",
        epilog=_EXAMPLES,
    )
    schedulers = manifest.add_subparsers(dest="scheduler", required=True, metavar="SCHEDULER")
    for name, module, what in (
        ("kubernetes", kubernetes, "generate an Indexed Job with its Service and volume"),
        ("slurm", slurm, "generate a script for sbatch"),
    ):
        parser = schedulers.add_parser(
            name,
            help=what,
            usage=f"kdist manifest {name} -n COUNT [options] script.py [argument ...]\n"
            f"       kdist manifest {name} -n COUNT [options] -m module [argument ...]",
        )
        module.add_options(parser)
        parser.set_defaults(write=module.write)


def main(options: argparse.Namespace) -> int:
    """Prints the manifest, or writes it to a file, and returns the exit code."""
    text = options.write(request.read_options(options), options)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    try:
        # Readable only by the user, because a manifest may contain a secret.
        private = functools.partial(os.open, mode=0o600)
        with open(options.output, "w", encoding="utf-8", opener=private) as file:
            file.write(text)
    except OSError as error:
        raise InvalidArgumentError(
            "kdist cannot write the manifest.",
            received={"output": options.output, "error": str(error)},
            hint="Choose another file with --output.",
        ) from error
    return 0
