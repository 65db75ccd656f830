"""Supervises the tasks of this machine. Passes on output and signals, and leaves no process behind.

The reaction to the exit of a task depends on its role:

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

import contextlib
import dataclasses
import functools
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from kdist.cluster import injection, timeouts
from kdist.launch import linux, report
from kdist.launch.output import Sink
from kdist.launch.plan import JobPlan, Policy
from kdist.launch.worker_process import WorkerProcess

# If a worker fails, its peers fail within milliseconds. Exits within these seconds count as one failure.
_WINDOW = 0.2
_LONGER_WINDOW = 0.4  # if a worker with a traceback is still exiting
_LONGEST_WINDOW = 0.6  # if the worker that failed first is still exiting: a lost worker exits at once
_TERM_TO_KILL = 0.3  # with the window, this terminates a failed job within a second
_PAUSE = 0.5  # seconds before the restart of a task, because the whole job may be ending
_LAST_WORDS = 5.0  # seconds for the chief to exit after the loss of a server
# Seconds for a worker to exit if its peers report an error of its code. It still prints the traceback, and shuts down
# its libraries, which can take more than a second on a busy machine.
_TO_EXIT = 5.0
# The interval, as a share of the heartbeat timeout, at which the launcher looks for stopped workers.
_LOOK = 0.05
_LOOKS = 4  # a worker that is stopped so often in a row is killed
_FOREVER = float("inf")


@dataclasses.dataclass
class Outcome:
    """How a job ended on this machine."""

    failed: WorkerProcess | None = None
    lost: int = 0  # workers that were killed, stopped or hung
    lost_server: WorkerProcess | None = None
    interrupted: int | None = None
    stopped: int | None = None  # the signal to the launcher, if it came after the failure
    unfinished: list[WorkerProcess] = dataclasses.field(default_factory=list)  # at the timeout


@dataclasses.dataclass
class Supervisor:
    """Starts tasks, waits for them, and terminates all tasks if the job fails."""

    workers: Sequence[WorkerProcess]  # not yet started
    plan: JobPlan  # its job ID identifies descendants of the tasks
    err: Sink  # receives the messages of the supervisor
    grace: float = 5.0  # seconds for tasks to exit after a signal to the launcher was passed on to them
    timeout: float | None = None  # the time limit of the job in seconds
    # If this process runs no user code, its descendants before the job. All other descendants belong to the job.
    others: Collection[int] | None = None
    policy: Policy = dataclasses.field(default_factory=Policy)  # the reaction to the exits of helpers

    def __post_init__(self) -> None:
        self._leaders = [worker for worker in self.workers if not worker.plan.helps]
        self._selector = selectors.DefaultSelector()
        self._outcome = Outcome()
        self._failures: list[WorkerProcess] = []
        self._judge_at = self._kill_at = self._deadline = self._discard_at = _FOREVER
        is_only_machine = self.plan.num_workers <= len(self.workers)
        self._look_at = _FOREVER if is_only_machine else 0.0
        self._ending = False
        self._due: list[tuple[float, Callable[[], None]]] = []  # delayed actions
        self._evaluator_lost: WorkerProcess | None = None

    def run(self) -> Outcome:
        """Runs the job to its end. Then all processes of the job have exited, including grandchildren."""
        if self.timeout is not None:
            self._deadline = time.monotonic() + self.timeout
        outcome = self._outcome
        try:
            self.plan.release_ports()
            for worker in self.workers:
                worker.start()
                self._watch(worker)
            while any(w.alive or (w.starting and not self._ending) for w in self.workers):
                self._step(self._patience())
                self._act()
            self._judge()
        finally:
            self._leave_nothing()
        if outcome.failed is None and outcome.interrupted is None and not outcome.unfinished:
            outcome.failed = self._evaluator_lost
        return outcome

    def _watch(self, worker: WorkerProcess) -> None:
        for fd in (*worker.channels, worker.pidfd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ, worker)

    def _patience(self) -> float | None:
        """Returns the maximum number of seconds to wait for an event; `None` for no limit."""
        until = min(
            self._judge_at, self._kill_at, self._deadline, self._look_at, *(when for when, _ in self._due)
        )
        if any(worker.alive and worker.pidfd is None for worker in self.workers):
            until = min(until, time.monotonic() + 0.02)
        if any(line.waits() for worker in self.workers for line in worker.lines()):
            until = min(until, time.monotonic() + 0.25)
        return None if until == _FOREVER else max(0.01, until - time.monotonic())

    def _step(self, patience: float | None) -> None:
        """Waits for events, and handles them in the order in which the system reports them."""
        for key, _ in self._selector.select(patience):
            worker = key.data
            if worker is None:
                self._on_signals(key.fileobj)
            elif key.fd == worker.pidfd:
                self._selector.unregister(key.fd)
                self._note_exit(worker)
            elif key.fd in worker.channels:
                # Unregistered first, because read() closes the descriptor at the end of the stream.
                self._selector.unregister(key.fd)
                if worker.read(key.fd):
                    self._selector.register(key.fd, selectors.EVENT_READ, worker)
        for worker in self.workers:
            if worker.pidfd is None:
                self._note_exit(worker)
            for line in worker.lines():
                line.tick()

    def _note_exit(self, worker: WorkerProcess) -> None:
        if worker.collect() and not self._ending:
            self._on_exit(worker)

    def _act(self) -> None:
        """Handles timeouts and failures that are due."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK * timeouts.heartbeat_timeout(self.workers[0].plan.environ)
            for worker in self.workers:
                worker.kill_if_stopped(_LOOKS)
        if now >= self._deadline:
            self._deadline = _FOREVER
            self._outcome.unfinished = [worker for worker in self.workers if worker.alive]
            self._ending = True
            for worker in self._outcome.unfinished:
                linux.send(worker.pid, signal.SIGUSR1)  # workers of kdist.launch print their stacks
            self._kill_at = now + 0.5
        if now >= self._judge_at and not self._awaits_exits(now):
            self._judge()
            self._signal_all(signal.SIGTERM)
            self._kill_at = now + _TERM_TO_KILL
        if now >= self._kill_at:
            self._kill_at = now + 0.2  # again, in case a new process has started meanwhile
            self._kill_everything()
        if self._outcome.interrupted is not None and not any(worker.alive for worker in self._leaders):
            self._dismiss_servers()
        due = [do for when, do in self._due if when <= now]
        self._due = [later for later in self._due if later[0] > now]
        for do in due:
            do()

    def _awaits_exits(self, now: float) -> bool:
        """Returns whether a worker that may have failed first is still exiting."""
        waited = now - (self._judge_at - _WINDOW)
        alive = [worker for worker in self.workers if worker.alive]
        if waited < _LONGER_WINDOW and any((worker.tail.traceback_at or 0) > now - 5.0 for worker in alive):
            return True
        is_reported = any(worker.tail.reports_another for worker in self._failures)
        longest = _TO_EXIT if is_reported else _LONGEST_WINDOW
        return waited < longest and bool(alive) and not report.reasons(self._failures)

    def _judge(self) -> None:
        """Finds the worker that failed first."""
        self._judge_at = _FOREVER
        if not self._failures or self._outcome.failed is not None or self._ending:
            return
        self._ending = True
        self._outcome.failed, self._outcome.lost = report.first_failure(self._failures, self.workers)

    def _signal_all(self, signum: int) -> None:
        for worker in self.workers:
            worker.send(signum)

    def _members(self) -> set[int]:
        alive = {worker.pid for worker in self.workers if worker.alive}
        roots = alive if self.others is None else {os.getpid()}
        return alive | linux.descendants(roots, self.others or ()) | linux.members_of_job(self.plan.job_id)

    def _kill_everything(self) -> None:
        found = self._members()
        self._signal_all(signal.SIGKILL)
        for pid in found:
            linux.send(pid, signal.SIGKILL)

    def _leave_nothing(self) -> None:
        """Kills all remaining processes, reads the rest of their output, and reaps zombies."""
        self._ending = True
        alone = self._outcome.failed is None and self._outcome.interrupted is None
        # After a success, helper processes (multiprocessing's resource tracker) get some time to clean up.
        patience = time.monotonic() + (0.3 if alone and not any(w.alive for w in self.workers) else 0.0)
        give_up = time.monotonic() + 3.0
        while time.monotonic() < give_up:
            # The system can reuse the PID of a reaped worker, so only live workers get signals.
            left = self._members() if any(w.process for w in self.workers) else set()
            if not left and not any(worker.alive for worker in self.workers):
                break
            if time.monotonic() >= patience:
                self._kill_everything()
            self._step(0.02)
            self._reap()
        drained = time.monotonic() + 0.5
        while any(worker.channels for worker in self.workers) and time.monotonic() < drained:
            self._step(0.02)
        for worker in self.workers:
            worker.close()
        self._reap()
        self._selector.close()

    def _reap(self) -> None:
        if self.others is not None:
            linux.reap_orphans(worker.pid for worker in self.workers if worker.alive)

    # The exit of a task.

    def _on_exit(self, worker: WorkerProcess) -> None:
        role = worker.plan.role
        if not worker.plan.helps:
            if worker.exit_code != 0:
                self._note_failure(worker)
            elif all(leader.exit_code == 0 for leader in self._leaders):
                self._finish()
        elif worker.dismissed:
            return
        elif role == "ps":
            self._say(
                f"{report.unexpected_exit(worker)}; its variables are lost, so the job ends. "
                f"The chief has {_LAST_WORDS:g} s to exit."
            )
            self._outcome.lost_server = self._outcome.lost_server or worker
            self._later(_LAST_WORDS, self._end_because_of, worker)
        elif role == "worker" or worker.exit_code != 0:
            # Its children may still use its port. The ID of the process group stays valid until all exit.
            linux.send(worker.pid, signal.SIGKILL, group=True)
            self._start_again(worker)

    def _note_failure(self, worker: WorkerProcess) -> None:
        # Preempted workers exit together, when the slowest worker has saved its share.
        window = self.grace if worker.exit_code == timeouts.PREEMPTED else _WINDOW
        if not self._failures or window == _WINDOW:
            self._judge_at = min(self._judge_at, time.monotonic() + window)
        self._failures.append(worker)

    def _later(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self._due.append((time.monotonic() + seconds, functools.partial(do, *args)))

    def _end_because_of(self, worker: WorkerProcess) -> None:
        if not self._ending and not worker.dismissed:
            self._failures.append(worker)
            self._judge_at = time.monotonic()

    def _start_again(self, worker: WorkerProcess) -> None:
        most = self.policy.task_restarts
        is_free = worker.restarts.is_free(worker) and most > 0
        which = "restart not counted" if is_free else worker.restarts.count(most)
        if which is None:
            self._go_on_without(worker)
            return
        worker.starting = True
        text = f"{report.unexpected_exit(worker)}; restarting it ({which}) while the job continues."
        self._later(_PAUSE, self._restart, worker, text)

    def _restart(self, worker: WorkerProcess, text: str) -> None:
        worker.starting = False
        if self._ending or worker.dismissed:
            return
        self._say(text)
        for fd in worker.channels:
            self._selector.unregister(fd)
        faults = self.policy.faults
        again = {injection.VARIABLE: injection.join([fault for fault in faults if fault.always])}
        worker.restart(again if faults else {})
        self._watch(worker)

    def _go_on_without(self, worker: WorkerProcess) -> None:
        alike = [other for other in self.workers if other.plan.helps and other.plan.role == worker.plan.role]
        if worker.plan.role == "evaluator":
            self._evaluator_lost = worker
        elif not any(other.is_here for other in alike):
            self._end_because_of(worker)
            return
        most = self.policy.task_restarts
        restarts = f"{most} {'restart' if most == 1 else 'restarts'}"
        self._say(f"{report.unexpected_exit(worker)} after {restarts}; the job continues without it.")

    # The end of the job.

    def _finish(self) -> None:
        """Terminates the other tasks after successful training. The evaluator has time to finish."""
        self._dismiss_servers()
        for evaluator in self.workers:
            if evaluator.plan.role == "evaluator" and evaluator.is_here:
                self._say(
                    f"training has ended; the evaluator has {self.policy.evaluator_timeout:g} s to finish."
                )
                self._later(self.policy.evaluator_timeout, self._end_evaluator, evaluator)

    def _end_evaluator(self, evaluator: WorkerProcess) -> None:
        if evaluator.is_here and not self._ending:
            seconds = f"{self.policy.evaluator_timeout:g} s"
            self._say(
                f"terminating the evaluator, which did not finish within {seconds} after training. "
                "To wait longer: --evaluator-timeout 3600"
            )
            self._dismiss(evaluator)

    def _dismiss_servers(self) -> None:
        for worker in self.workers:
            if worker.plan.helps and worker.plan.role != "evaluator":
                self._dismiss(worker)

    def _dismiss(self, worker: WorkerProcess) -> None:
        """Terminates a task that is no longer needed."""
        if worker.dismissed:
            return
        worker.dismissed, worker.starting = True, False
        if worker.alive:
            worker.send(signal.SIGTERM)
            self._later(self.grace, worker.send, signal.SIGKILL)

    def _say(self, text: str) -> None:
        self.err.say(f"kdist: {text}")

    # Signals to the launcher itself.

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Returns a context manager that passes Ctrl-C, SIGTERM and SIGHUP on to the workers.

        It has no effect outside the main thread, because Python allows signal handlers only there.
        """

        def gives_up() -> bool:
            self._on_signals(arriving)
            return time.monotonic() >= self._discard_at

        with linux.caught_signals(self._on_signals) as arriving:
            if arriving is not None:
                self._selector.register(arriving, selectors.EVENT_READ, None)
                self._set_gives_up(gives_up)
            try:
                yield
            finally:
                self._set_gives_up(None)

    def _set_gives_up(self, function: Callable[[], bool] | None) -> None:
        # Otherwise, a signal would have no effect while no program reads the output, as in `| sleep 60`.
        for sink in {sink for worker in self.workers for sink in (worker.out, worker.err)}:
            sink.gives_up = function

    def _on_signals(self, connection: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            for signum in connection.recv(64):
                if signum in linux.ENDING:
                    self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        self._discard_at = min(self._discard_at, time.monotonic() + self.grace)
        if self._outcome.interrupted is not None or self._outcome.failed is not None:
            if signum == signal.SIGINT:
                self._kill_at = self._discard_at = 0.0  # the second Ctrl-C
            if self._outcome.interrupted is None:
                self._outcome.stopped = signum
            return
        self._outcome.interrupted = signum
        self._ending = True
        self._judge_at = _FOREVER
        self._kill_at = time.monotonic() + self.grace
        # Workers and servers of a chief keep running until the chief has saved its state; see `_act`.
        for worker in self.workers:
            if not worker.plan.helps or worker.plan.role == "evaluator":
                worker.send(signum)
