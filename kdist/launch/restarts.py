"""Runs a job for `kdist run`, and restarts it after failures."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from kdist.cluster import injection, logs, timeouts
from kdist.errors import InvalidArgumentError
from kdist.launch import linux, outline, report
from kdist.launch.options import whole_number
from kdist.launch.output import Sink, sinks
from kdist.launch.plan import EVALUATOR_TIMEOUT, TASK_RESTARTS, JobPlan, Policy, plan_job
from kdist.launch.supervisor import Outcome, Supervisor
from kdist.launch.worker_process import Restarts, WorkerProcess


def read_options(
    options: argparse.Namespace, local_workers: int, hosts: Sequence[str], num_ps: int = 0
) -> Policy:
    """Returns the policy for the options of `kdist run`.

    Raises:
        InvalidArgumentError: If an option is invalid.
    """
    total = local_workers * max(1, len(hosts))
    if num_ps and (hosts or options.min_workers is not None):
        raise InvalidArgumentError(
            "--num-ps cannot be combined with --hosts or --min-workers, because each worker restarts individually.",
            received={"num_ps": num_ps, "hosts": list(hosts), "min_workers": options.min_workers},
            hint="On several machines, start each task with its TF_CONFIG and the same KDIST_CLUSTER_TOKEN."
            if hosts
            else "Remove --min-workers.",
        )
    fewest = None
    if options.min_workers is not None:
        fewest = whole_number("--min-workers", options.min_workers, 1)
        if len(hosts) > 1:
            raise InvalidArgumentError(
                "--min-workers works only on one machine, because launchers do not detect losses on other machines.",
                received={"min_workers": fewest, "hosts": list(hosts)},
                hint="Remove --min-workers. To restart with all workers: --max-restarts 3",
            )
        if fewest > local_workers:
            raise InvalidArgumentError(
                "--min-workers is larger than --num-workers.",
                received={"min_workers": fewest, "num_workers": local_workers},
                hint="For example: kdist run --num-workers 4 --min-workers 2 train.py",
            )
    faults = [injection.parse(text) for text in options.inject]
    for fault in faults:
        if fault.worker is not None and fault.worker >= total:
            raise InvalidArgumentError(
                f"--inject names worker {fault.worker}, but the last worker of this job is worker {total - 1}.",
                received={"inject": str(fault)},
                hint=f"Choose a worker of this job, for example: --inject {fault.kind}:worker={total - 1}",
            )
    restarts = None
    if options.max_restarts is not None:
        restarts = whole_number("--max-restarts", options.max_restarts, 0)
    patience = EVALUATOR_TIMEOUT
    if options.evaluator_timeout is not None:
        patience = timeouts.parse_seconds(options.evaluator_timeout, "--evaluator-timeout")
    return Policy(
        max_restarts=0 if num_ps else restarts or 0,
        task_restarts=TASK_RESTARTS if restarts is None else restarts,
        evaluator_timeout=patience,
        min_workers=fewest,
        faults=faults,
    )


@dataclasses.dataclass(kw_only=True)
class Job:
    """A job on this machine, with all its restarts."""

    command: Sequence[str]  # of each worker
    local_workers: int  # on this machine, which can decrease after losses
    num_ps: int = 0
    evaluator: bool = False
    hosts: Sequence[str]  # the addresses of all machines; empty if the job has only this machine
    host_index: int
    backend: str | None  # `None` for the backend of the environment
    log_dir: str | None
    grace: float  # seconds for workers to exit after a signal
    policy: Policy
    asked: str | int = "auto"  # the number of workers that the user requested
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _starts: int = dataclasses.field(default=0, init=False)
    _others: set[int] = dataclasses.field(default_factory=set, init=False)  # processes from before the job
    _restarts: Restarts = dataclasses.field(default_factory=Restarts, init=False)

    def run(self) -> int:
        """Runs the job until it succeeds or has no restart left, and returns the launcher's exit code."""
        linux.become_subreaper()
        # A shell can have started them before `exec kdist run`.
        self._others = linux.descendants([os.getpid()])
        out, err = sinks()
        try:
            while True:
                plan = self._plan()
                self._tell(plan)
                workers, outcome = self._run_once(plan, out, err)
                failed = outcome.failed
                if outcome.interrupted is not None:
                    return _end_interrupted(workers, outcome.interrupted, err)
                if failed is None:
                    return 0
                err.say(f"\n{report.failure_block(failed, workers, outcome.lost_server)}")
                again = self._again(failed, outcome)
                if again is not None and outcome.stopped is not None:
                    err.say(f"kdist: received {_signal(outcome.stopped)}; the job is not restarted.")
                    again = None
                if again is None:
                    return report.shell_exit_code(failed.exit_code or 1)
                err.say(again)
                self._starts += 1
        except KeyboardInterrupt:  # between two starts; otherwise, the supervisor handles the signal
            return 128 + signal.SIGINT

    def dry_run(self) -> int:
        """Prints the plan of `run`, without starting anything."""
        plan = self._plan()
        plan.release_ports()
        said = (
            f"plan: {self._line(plan)}",
            outline.left_idle(plan),
            outline.details(plan, self.command),
            "Nothing was started." + (" Each start chooses new free ports." if not self.hosts else ""),
        )
        print("\n".join(filter(None, said)))
        return 0

    def _tell(self, plan: JobPlan) -> None:
        if self._starts:
            logs.logger.debug("start %d: %s", self._starts, self._line(plan))
            return
        logs.notice("%s", self._line(plan))
        if idle := outline.left_idle(plan):
            logs.logger.warning("%s", idle)

    def _line(self, plan: JobPlan) -> str:
        return outline.line(plan, self.asked, max(1, len(self.hosts)))

    def _plan(self) -> JobPlan:
        faults = [fault for fault in self.policy.faults if self._starts == 0 or fault.always]
        told = {
            **self.variables,
            timeouts.RESTART_VARIABLE: str(self._starts),
            injection.VARIABLE: injection.join(faults),
        }
        return plan_job(
            self.local_workers,
            self.num_ps,
            self.evaluator,
            hosts=self.hosts,
            host_index=self.host_index,
            backend=self.backend,
            extra=told,
        )

    def _run_once(self, plan: JobPlan, out: Sink, err: Sink) -> tuple[list[WorkerProcess], Outcome]:
        several, folder = plan.num_workers > 1, self.log_dir
        workers = [
            WorkerProcess(
                worker,
                self.command,
                out,
                err,
                prefix=f"[{worker.name}] " if several else "",
                log_file=folder and os.path.join(folder, f"{worker.name.replace(' ', '-')}.log"),
                append=self._starts > 0,
                keep_stdin=not several,
            )
            for worker in plan.workers
        ]
        supervisor = Supervisor(workers, plan, err, grace=self.grace, policy=self.policy, others=self._others)
        with supervisor.forwarding():
            outcome = supervisor.run()
            if sys.stdout:
                sys.stdout.flush()
        return workers, outcome

    def _again(self, failed: WorkerProcess, outcome: Outcome) -> str | None:
        """Decides whether the job restarts. Returns the message for the user, or `None` for no restart."""
        policy = self.policy
        if self.num_ps or failed.plan.helps:
            return None
        why = f"{failed.name} {report.describe_exit(failed.exit_code or 1, failed.frozen)}"
        fewer = self.local_workers
        if policy.min_workers is not None and outcome.lost:
            fewer = max(self.local_workers - outcome.lost, policy.min_workers)
        if failed.exit_code == timeouts.PREEMPTED and policy.max_restarts == 0:
            return None
        if self._restarts.is_free(failed):
            which = f"restart {self._starts + 1} (not counted)"
        elif fewer < self.local_workers:
            which = f"restart {self._starts + 1} with fewer workers"
            self.local_workers = fewer
        elif counted := self._restarts.count(policy.max_restarts):
            which = counted
        else:
            return None
        noun = "worker" if self.local_workers == 1 else "workers"
        return f"kdist: {which} because {why}; starting {self.local_workers} {noun}."


def _end_interrupted(workers: Sequence[WorkerProcess], signum: int, err: Sink) -> int:
    err.say(f"kdist: received {_signal(signum)}; all workers have exited.")
    codes = {worker.exit_code for worker in workers if not worker.plan.helps}
    # If all workers handled the signal (saved a checkpoint and exited with 0), the job has succeeded.
    if codes == {0}:
        return 0
    return timeouts.PREEMPTED if codes <= {0, timeouts.PREEMPTED} else 128 + signum


def _signal(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else linux.signal_name(signum)
