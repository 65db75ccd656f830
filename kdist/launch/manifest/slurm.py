"""Writes a script for `sbatch`. It starts one task per worker with `srun`, which sets the cluster variables.

Slurm restarts a job if a node fails or the job is preempted. The script restarts a failed step. If the
workers have saved a checkpoint because the time limit is near, the script requeues the job.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex

from kdist.cluster import timeouts
from kdist.cluster.environment import TOKEN_VARIABLE
from kdist.errors import InvalidArgumentError
from kdist.launch.manifest.request import CHECKPOINTS, Request
from kdist.launch.manifest.request import add_options as add_common_options
from kdist.launch.options import whole_number
from kdist.launch.plan import THREADS

_WORD = re.compile(r"[A-Za-z0-9_.,:+=@%/-]+")
# srun must not kill workers when one exits, because they exit by themselves and may need time to save. Sites
# can change the defaults, so all options are explicit. kdist needs tasks that are numbered node by node.
_SRUN = "srun --kill-on-bad-exit=0 --wait=0 --distribution=block --label"
# `openssl` may not be installed, so the script uses /dev/urandom. srun passes the variable on to all tasks.
_SECRET = f"""\
# The secret that the workers of this job share.
export {TOKEN_VARIABLE}=${{{TOKEN_VARIABLE}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}
"""
_LOOP = """\
# Restart a failed step up to {max_restarts} times. Training resumes from its last checkpoint.
for ((start = 0; start <= {max_restarts}; start++)); do
  export {restart}=$((${{SLURM_RESTART_COUNT:-0}} + start))
  {step}
  code=$?
  case $code in
    0 | 2) exit $code ;; # success, or a wrong command line
    {preempted}) # preempted after saving a checkpoint: back to the queue
      scontrol requeue "$SLURM_JOB_ID"
      exit $code ;;
  esac
done
exit $code
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser, checkpoint_dir="checkpoints")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("--nodes", metavar="COUNT", help="number of nodes (default: Slurm decides)")
    slurm.add_argument("--partition", metavar="NAME", help="partition to submit to (default: set by Slurm)")
    slurm.add_argument("--account", metavar="NAME", help="account to charge (default: set by Slurm)")


def write(request: Request, options: argparse.Namespace) -> str:
    """Returns the script."""
    directives = "".join(
        f"#SBATCH --{name}" + (f"={value}\n" if value else "\n")
        for name, value in _directives(request, options).items()
        if value is not None
    )
    variables, step = request.variables, _SRUN
    if request.cpus is not None:
        variables = dict.fromkeys(THREADS, str(request.cpus)) | variables
        step += f" --cpus-per-task={request.cpus}"  # srun does not inherit it from sbatch
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    step += f" {shlex.join(request.command)}"
    body = f"exec {step}\n"
    if request.max_restarts:
        body = _LOOP.format(
            max_restarts=request.max_restarts,
            restart=timeouts.RESTART_VARIABLE,
            preempted=timeouts.PREEMPTED,
            step=step,
        )
    return (
        "#!/bin/bash\n# Written by kdist manifest slurm. Submit this script with sbatch.\n"
        "# If the job hangs, generate this file with `-m kdist doctor` instead of the script.\n"
        f'{directives}\n{exports}{_SECRET}mkdir -p "${CHECKPOINTS}"\n\n{body}'
    )


def _directives(request: Request, options: argparse.Namespace) -> dict[str, str | None]:
    """Returns the options of `sbatch` by name. "" means an option without value, `None` an omitted option."""
    for name in ("partition", "account"):
        value = getattr(options, name)
        if value is not None and not _WORD.fullmatch(value):
            raise InvalidArgumentError(
                f"--{name} is not a Slurm name.",
                received={name: value},
                hint="Use only letters, digits and the characters _ . , : + = @ % / -",
            )
    nodes = None if options.nodes is None else str(whole_number("--nodes", options.nodes, 1))
    memory = None if request.megabytes is None else math.ceil(request.megabytes / (request.cpus or 1))
    return {
        "job-name": request.name,
        "account": options.account,
        "partition": options.partition,
        "nodes": nodes,
        "ntasks": str(request.num_workers),
        "cpus-per-task": None if request.cpus is None else str(request.cpus),
        "gpus-per-task": str(request.gpus) if request.gpus else None,
        "mem-per-cpu": None if memory is None else f"{memory}M",
        "time": None if request.seconds is None else _time(request.seconds),
        "output": f"{request.name}-%j.log",
        "open-mode": "append",
        # Slurm sends the signal to the workers, not to this script.
        "signal": f"TERM@{request.grace}",
        "requeue" if request.max_restarts else "no-requeue": "",
    }


def _time(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
