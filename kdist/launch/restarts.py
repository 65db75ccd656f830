"""A job from its first start to its last: what `kdist run` does after a failure."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence

from kdist.cluster import injection, liveness
from kdist.cluster.injection import Fault
from kdist.errors import InvalidArgumentError
from kdist.launch import linux, report
from kdist.launch.options import whole_number
from kdist.launch.output import Sink, sinks
from kdist.launch.plan import JobPlan, plan_job
from kdist.launch.supervisor import Outcome, Supervisor
from kdist.launch.worker_process import WorkerProcess


@dataclasses.dataclass(frozen=True)
class Policy:
    """What happens after a failure, and what is to fail.

    Args:
        max_restarts: How often the job is started again.
        min_workers: With how few workers the job goes on once some are lost; `None` if it needs all.
        heartbeat_timeout: Seconds after which a worker that is dead or stopped must have been noticed; `None` for
            what the environment says.
        hang_timeout: Seconds after which a worker ends that stands still while others wait for it; as above.
        faults: What `--inject` asks for.
    """

    max_restarts: int = 0
    min_workers: int | None = None
    heartbeat_timeout: float | None = None
    hang_timeout: float | None = None
    faults: Sequence[Fault] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kdist run` that a `Policy` consists of."""
    parser.add_argument(
        "--max-restarts",
        default="0",
        metavar="R",
        help="start the whole job again after a failure, so many times (default 0)",
    )
    parser.add_argument(
        "--min-workers",
        metavar="M",
        help="after the loss of a worker, go on with those that are left, but not with fewer than M",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        metavar="S",
        help="seconds after which a worker that is dead or stopped must have been noticed (default 15)",
    )
    parser.add_argument(
        "--hang-timeout",
        metavar="S",
        help="seconds after which a worker ends that stands still while others wait for it (default 600)",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="let a worker fail, to rehearse it: kill:worker=1,step=30; also hang, freeze, slow, exit, sigterm "
        "and exception, with step=, epoch=, phase=, seconds=",
    )


def read_options(options: argparse.Namespace, local_workers: int, hosts: Sequence[str]) -> Policy:
    """Checks the options that `add_options` has added, for the workers of this machine and all machines of the job.

    Raises:
        InvalidArgumentError: If one of them cannot be.
    """
    total = local_workers * max(1, len(hosts))
    fewest = None
    if options.min_workers is not None:
        fewest = whole_number("--min-workers", options.min_workers, 1)
        if fewest > local_workers or len(hosts) > 1:
            raise InvalidArgumentError(
                "--min-workers must not be more than there are workers, and needs a job of one machine: on several, "
                "the launchers do not know of each other's losses.",
                received={"min_workers": fewest, "num_workers": local_workers, "hosts": list(hosts)},
                hint="For example: kdist run --num-workers 4 --min-workers 2 train.py",
            )
    faults = [injection.parse(text) for text in options.inject]
    for fault in faults:
        if fault.worker is not None and fault.worker >= total:
            raise InvalidArgumentError(
                f"A fault must be of a worker of this job, from 0 to {total - 1}.",
                received={"inject": str(fault)},
            )
    return Policy(
        max_restarts=whole_number("--max-restarts", options.max_restarts, 0),
        min_workers=fewest,
        heartbeat_timeout=_seconds("--heartbeat-timeout", options.heartbeat_timeout),
        hang_timeout=_seconds("--hang-timeout", options.hang_timeout),
        faults=faults,
    )


def _seconds(name: str, text: str | None) -> float | None:
    return None if text is None else liveness.parse_seconds(text, name)


@dataclasses.dataclass(kw_only=True)
class Job:
    """All starts of a job on this machine.

    Args:
        command: What a worker runs.
        local_workers: How many workers this machine has; fewer once some are lost.
        hosts: The machines of the job; empty for this one alone.
        host_index: Which of them this machine is.
        backend: The Keras backend; `None` for what the environment says.
        log_dir: Where the workers' output is kept too.
        grace: How many seconds workers may take to end after a signal.
        policy: What happens after a failure.
    """

    command: Sequence[str]
    local_workers: int
    hosts: Sequence[str]
    host_index: int
    backend: str | None
    log_dir: str | None
    grace: float
    policy: Policy
    _starts: int = dataclasses.field(default=0, init=False)
    _counted: int = dataclasses.field(default=0, init=False)  # restarts that count against `max_restarts`

    def run(self) -> int:
        """Runs the job until it has ended well, or may not be started again; returns the launcher's exit code."""
        linux.become_subreaper()
        out, err = sinks()
        try:
            while True:
                plan = self._plan()
                workers, outcome = self._run_once(plan, out, err)
                failed = outcome.failed
                if outcome.interrupted is not None:
                    return _end_interrupted(workers, outcome.interrupted)
                if failed is None:
                    return 0
                _say("\n" + _failure(failed, workers))
                again = self._again(failed, outcome)
                if again is None:
                    return report.shell_exit_code(failed.exit_code or 1)
                _say(again)
                self._starts += 1
        except KeyboardInterrupt:  # between two starts: during one, the supervisor takes it
            return 128 + signal.SIGINT

    def _plan(self) -> JobPlan:
        policy = self.policy
        faults = [fault for fault in policy.faults if self._starts == 0 or fault.always]
        told = {liveness.RESTART_VARIABLE: str(self._starts), injection.VARIABLE: injection.join(faults)}
        for name, seconds in (
            (liveness.HEARTBEAT_VARIABLE, policy.heartbeat_timeout),
            (liveness.HANG_VARIABLE, policy.hang_timeout),
        ):
            if seconds is not None:
                told[name] = f"{seconds:g}"
        return plan_job(
            self.local_workers,
            hosts=self.hosts,
            host_index=self.host_index,
            backend=self.backend,
            extra=told,
        )

    def _run_once(self, plan: JobPlan, out: Sink, err: Sink) -> tuple[list[WorkerProcess], Outcome]:
        several = plan.num_workers > 1
        workers = [
            WorkerProcess(
                worker,
                self.command,
                out,
                err,
                prefix=f"[{worker.name}] " if several else "",
                log_file=os.path.join(self.log_dir, f"worker-{worker.index}.log") if self.log_dir else None,
                append=self._starts > 0,
                keep_stdin=not several,
            )
            for worker in plan.workers
        ]
        supervisor = Supervisor(workers, plan, grace=self.grace, whole_tree=True)
        with supervisor.forwarding():
            outcome = supervisor.run()
            sys.stdout.flush()
        return workers, outcome

    def _again(self, failed: WorkerProcess, outcome: Outcome) -> str | None:
        """Decides whether the job is started again. Returns what to tell the user then, else `None`."""
        policy = self.policy
        why = f"{failed.name} {report.describe_exit(failed.exit_code or 1, failed.frozen)}"
        fewer = self._left(outcome)
        if failed.exit_code == liveness.PREEMPTED:
            if policy.max_restarts == 0:
                return None
            which = f"restart {self._starts + 1}, which does not count,"
        elif fewer < self.local_workers:
            which = f"restart {self._starts + 1}, with fewer workers,"
            self.local_workers = fewer
        elif self._counted < policy.max_restarts:
            self._counted += 1
            which = f"restart {self._counted} of {policy.max_restarts}"
        else:
            return None
        noun = "worker" if self.local_workers == 1 else "workers"
        return f"kdist: {which} because {why}; starting {self.local_workers} {noun}."

    def _left(self, outcome: Outcome) -> int:
        """With how many workers the job may go on: as many as it had, unless some of them are lost."""
        if self.policy.min_workers is None or outcome.lost == 0:
            return self.local_workers
        return max(self.local_workers - outcome.lost, self.policy.min_workers)


def _end_interrupted(workers: Sequence[WorkerProcess], signum: int) -> int:
    name = "Ctrl-C" if signum == signal.SIGINT else linux.signal_name(signum)
    print(f"kdist: {name}; all workers have ended.", file=sys.stderr)
    codes = {worker.exit_code for worker in workers}
    # Workers that took the signal as a wish (saved a checkpoint, ended in peace) make a job that ended well.
    if codes == {0}:
        return 0
    return liveness.PREEMPTED if codes <= {0, liveness.PREEMPTED} else 128 + signum


def _failure(failed: WorkerProcess, workers: Sequence[WorkerProcess]) -> str:
    return report.failure_block(
        f"{failed.name} ({failed.plan.address})" if len(workers) > 1 else failed.name,
        failed.exit_code or 1,
        failed.tail.lines(),
        log_file=failed.log_file,
        others=[worker.name for worker in workers if worker is not failed],
        frozen=failed.frozen,
    )


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody reads any more
