"""Supervises a job whose tasks have different roles, and reacts to the exit of a task by its role.

- The chief, or all workers of a job without a chief, with code 0: servers and workers are terminated, and the
  evaluator has some time to finish.
- The chief, or a worker of a job without a chief, with another code: the job fails.
- A server: its variables are lost, so the job fails. The chief gets some seconds to report this itself.
- A worker of a chief: it is restarted a limited number of times. Then the job continues with the other
  workers, and fails if there are none.
- The evaluator: nothing if the code is 0. Otherwise it is restarted like a worker. If it is lost, the job
  fails after training.
"""

from __future__ import annotations

import collections
import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster import liveness
from kdist.launch import linux, report
from kdist.launch.output import Sink
from kdist.launch.plan import JobPlan
from kdist.launch.supervisor import Outcome, Supervisor
from kdist.launch.worker_process import WorkerProcess

TASK_RESTARTS = 3
EVALUATOR_TIMEOUT = 600.0
_PAUSE = 0.5  # seconds before a restart, because the whole job may be ending
_LAST_WORDS = 5.0  # seconds for the chief to exit after the loss of a server


class RoleSupervisor(Supervisor):
    """Starts the tasks of a job with roles, waits for them, and reacts to their exits.

    Args:
        workers: The tasks, which are not yet started.
        plan: The plan of the job.
        err: Receives the messages of the supervisor.
        restarts: The maximum number of restarts of the evaluator and of each worker of a chief.
        told_again: Additional environment variables after a restart.
        evaluator_timeout: Seconds for the evaluator to finish after training has ended.
        **kwargs: See `Supervisor`.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        plan: JobPlan,
        *,
        err: Sink,
        restarts: int = TASK_RESTARTS,
        told_again: Mapping[str, str] | None = None,
        evaluator_timeout: float = EVALUATOR_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(workers, plan, **kwargs)
        self._err = err
        self._most_restarts = restarts
        self._told_again = dict(told_again or {})
        self._evaluator_timeout = evaluator_timeout
        self._leaders = [worker for worker in workers if not worker.plan.helps]
        self._helpers = [worker for worker in workers if worker.plan.helps]
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._starting: set[str] = set()  # tasks that are about to restart
        self._dismissed: set[str] = set()  # tasks that may exit now
        self._starts: collections.Counter[str] = collections.Counter()
        self._counted: collections.Counter[str] = collections.Counter()  # restarts that count
        self._evaluator_lost: WorkerProcess | None = None

    def run(self) -> Outcome:
        """Runs the job to its end. Then all processes of the job have exited, including grandchildren."""
        outcome = super().run()
        if outcome.failed is None and outcome.interrupted is None and not outcome.unfinished:
            outcome.failed = self._evaluator_lost
        return outcome

    def _is_running(self) -> bool:
        return super()._is_running() or bool(self._starting and not self._ending)

    # Delayed actions.

    def _later(self, seconds: float, do: Callable[[WorkerProcess], None], worker: WorkerProcess) -> None:
        self._due.append((time.monotonic() + seconds, functools.partial(do, worker)))

    def _patience(self) -> float | None:
        patience = super()._patience()
        if not self._due:
            return patience
        left = max(0.01, min(when for when, _ in self._due) - time.monotonic())
        return left if patience is None else min(left, patience)

    def _act(self) -> None:
        super()._act()
        if self._outcome.interrupted is not None and not any(worker.alive for worker in self._leaders):
            self._dismiss_servers()
        now = time.monotonic()
        due = [do for when, do in self._due if when <= now]
        self._due = [later for later in self._due if later[0] > now]
        for do in due:
            do()

    # The exit of a task.

    def _on_exit(self, worker: WorkerProcess) -> None:
        if not worker.plan.helps:
            if worker.exit_code != 0:
                super()._on_exit(worker)
            elif all(leader.exit_code == 0 for leader in self._leaders):
                self._finish()
        elif worker.name in self._dismissed:
            return
        elif worker.plan.role == "ps":
            self._say(
                f"{_what(worker)}; its variables are lost, so the job ends. "
                f"The chief has {_LAST_WORDS:g} s to exit."
            )
            self._outcome.lost_server = self._outcome.lost_server or worker
            self._later(_LAST_WORDS, self._end_because_of, worker)
        elif worker.plan.role == "worker" or worker.exit_code != 0:
            # Its children may still use its port. The ID of the process group stays valid until all exit.
            linux.send(worker.pid, signal.SIGKILL, group=True)
            self._start_again(worker)

    def _end_because_of(self, worker: WorkerProcess) -> None:
        if not self._ending and worker.name not in self._dismissed:
            self._failures.append(worker)
            self._judge_at = time.monotonic()

    def _start_again(self, worker: WorkerProcess) -> None:
        if worker.exit_code == liveness.PREEMPTED and self._most_restarts:
            which = "restart not counted"
        elif self._counted[worker.name] < self._most_restarts:
            self._counted[worker.name] += 1
            which = f"restart {self._counted[worker.name]} of {self._most_restarts}"
        else:
            self._go_on_without(worker)
            return
        self._starting.add(worker.name)
        text = f"{_what(worker)}; restarting it ({which}) while the job continues."
        self._later(_PAUSE, functools.partial(self._restart, text), worker)

    def _restart(self, text: str, worker: WorkerProcess) -> None:
        self._starting.discard(worker.name)
        if self._ending or worker.name in self._dismissed:
            return
        self._say(text)
        self._starts[worker.name] += 1
        for fd in worker.channels:
            self._selector.unregister(fd)
        worker.restart({**self._told_again, liveness.RESTART_VARIABLE: str(self._starts[worker.name])})
        self._watch(worker)

    def _go_on_without(self, worker: WorkerProcess) -> None:
        alike = [other for other in self._helpers if other.plan.role == worker.plan.role]
        if worker.plan.role == "evaluator":
            self._evaluator_lost = worker
        elif not any(other.alive or other.name in self._starting for other in alike):
            self._end_because_of(worker)
            return
        restarts = f"{self._most_restarts} {'restart' if self._most_restarts == 1 else 'restarts'}"
        self._say(f"{_what(worker)} after {restarts}; the job continues without it.")

    # The end of the job.

    def _finish(self) -> None:
        """Terminates the other tasks after successful training. The evaluator has time to finish."""
        self._dismiss_servers()
        for evaluator in self._helpers:
            if evaluator.plan.role == "evaluator" and self._is_here(evaluator):
                self._say(f"training has ended; the evaluator has {self._evaluator_timeout:g} s to finish.")
                self._later(self._evaluator_timeout, self._end_evaluator, evaluator)

    def _end_evaluator(self, evaluator: WorkerProcess) -> None:
        if self._is_here(evaluator) and not self._ending:
            self._say(
                f"terminating the evaluator, which did not finish within {self._evaluator_timeout:g} s after training. "
                "To wait longer: --evaluator-timeout 3600"
            )
            self._dismiss(evaluator)

    def _is_here(self, worker: WorkerProcess) -> bool:
        return worker.alive or worker.name in self._starting

    def _dismiss_servers(self) -> None:
        for helper in self._helpers:
            if helper.plan.role != "evaluator":
                self._dismiss(helper)

    def _dismiss(self, worker: WorkerProcess) -> None:
        """Terminates a task that is no longer needed."""
        if worker.name in self._dismissed:
            return
        self._dismissed.add(worker.name)
        self._starting.discard(worker.name)
        if worker.alive:
            linux.send(worker.pid, signal.SIGTERM, group=True)
            self._later(self._grace, _kill, worker)

    def _pass_on(self, signum: int) -> None:
        # Workers and servers keep running until the chief has saved its state; see `_act`.
        for worker in self._workers:
            if worker.alive and (not worker.plan.helps or worker.plan.role == "evaluator"):
                linux.send(worker.pid, signum, group=True)

    def _say(self, text: str) -> None:
        self._err.say(f"kdist: {text}")


def _what(worker: WorkerProcess) -> str:
    what = f"{worker.plan.full_name} {report.describe_exit(worker.exit_code or 0)}"
    return (
        what
        if worker.exit_code
        else f"{what} while the job needs it (call kdist.Server(…).join(), which does not return)"
    )


def _kill(worker: WorkerProcess) -> None:
    if worker.alive:
        linux.send(worker.pid, signal.SIGKILL, group=True)
