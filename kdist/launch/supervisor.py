"""Supervises the workers of this machine. Passes on output and signals, and leaves no process behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist.cluster import liveness
from kdist.launch import linux
from kdist.launch.plan import JobPlan
from kdist.launch.worker_process import WorkerProcess

# If a worker fails, its peers fail within milliseconds. Exits within these seconds count as one failure.
_WINDOW = 0.2
_LONGER_WINDOW = 0.4  # if a worker with a traceback is still exiting
_LONGEST_WINDOW = 0.6  # if the worker that failed first is still exiting
_TERM_TO_KILL = 0.3  # with the window, this terminates a failed job within a second
_FOREVER = float("inf")
# The loss of a peer does not cause these signals, so a worker that died of one of them failed first.
_OWN_FAULT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclasses.dataclass
class Outcome:
    """How a job ended on this machine."""

    failed: WorkerProcess | None = None
    lost: int = 0  # workers that were killed, stopped or hung
    lost_server: WorkerProcess | None = None
    interrupted: int | None = None
    stopped: int | None = None  # the signal to the launcher, if it came after the failure
    unfinished: list[WorkerProcess] = dataclasses.field(default_factory=list)  # at the timeout


class Supervisor:
    """Starts workers, waits for them, and terminates all workers if one of them fails.

    Args:
        workers: The workers, which are not yet started.
        plan: The plan of the job. Its job ID identifies descendants of the workers.
        grace: Seconds for workers to exit after a signal to the launcher was passed on to them.
        timeout: The time limit of the job in seconds.
        whole_tree: Whether all descendants of this process belong to the job. True for the command line,
            false if user code also runs in this process.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        plan: JobPlan,
        *,
        grace: float = 5.0,
        timeout: float | None = None,
        whole_tree: bool = False,
    ) -> None:
        self._workers = list(workers)
        self._plan = plan
        self._grace = grace
        self._timeout = timeout
        self._whole_tree = whole_tree
        self._selector = selectors.DefaultSelector()
        self._outcome = Outcome()
        self._failures: list[WorkerProcess] = []
        self._judge_at = self._kill_at = self._deadline = self._discard_at = _FOREVER
        self._ending = False

    def run(self) -> Outcome:
        """Runs the job to its end. Then all processes of the job have exited, including grandchildren."""
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout
        try:
            self._start()
            while self._is_running():
                self._step(self._patience())
                self._act()
            self._judge()
        finally:
            self._leave_nothing()
        return self._outcome

    def _start(self) -> None:
        self._plan.release_ports()
        for worker in self._workers:
            worker.start()
            self._watch(worker)

    def _watch(self, worker: WorkerProcess) -> None:
        for fd in (*worker.channels, worker.pidfd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ, worker)

    def _is_running(self) -> bool:
        return any(worker.alive for worker in self._workers)

    def _patience(self) -> float | None:
        """Returns the maximum number of seconds to wait for an event; `None` for no limit."""
        until = min(self._judge_at, self._kill_at, self._deadline)
        if any(worker.alive and worker.pidfd is None for worker in self._workers):
            until = min(until, time.monotonic() + 0.02)
        if any(line.waits() for worker in self._workers for line in worker.lines()):
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
                self._read(worker, key.fd)
        for worker in self._workers:
            if worker.pidfd is None:
                self._note_exit(worker)
            for line in worker.lines():
                line.tick()

    def _read(self, worker: WorkerProcess, fd: int) -> None:
        # Unregistered first, because read() closes the descriptor at the end of the stream.
        self._selector.unregister(fd)
        if worker.read(fd):
            self._selector.register(fd, selectors.EVENT_READ, worker)

    def _note_exit(self, worker: WorkerProcess) -> None:
        if worker.collect() and not self._ending:
            self._on_exit(worker)

    def _on_exit(self, worker: WorkerProcess) -> None:
        if worker.exit_code == 0:
            return
        # Preempted workers exit together, when the slowest worker has saved its share.
        window = self._grace if worker.exit_code == liveness.PREEMPTED else _WINDOW
        if not self._failures or window == _WINDOW:
            self._judge_at = min(self._judge_at, time.monotonic() + window)
        self._failures.append(worker)

    def _act(self) -> None:
        """Handles timeouts and failures that are due."""
        now = time.monotonic()
        if now >= self._deadline:
            self._deadline = _FOREVER
            self._outcome.unfinished = [worker for worker in self._workers if worker.alive]
            self._ending = True
            for worker in self._outcome.unfinished:
                linux.send(worker.pid, signal.SIGUSR1)  # workers of kdist.launch print their stacks
            self._kill_at = now + 0.5
        if now >= self._judge_at:
            waited = now - (self._judge_at - _WINDOW)
            if waited < _LONGER_WINDOW and self._somebody_is_falling():
                return
            if waited < _LONGEST_WINDOW and not self._reasons() and any(w.alive for w in self._workers):
                return
            self._judge()
            self._signal_all(signal.SIGTERM)
            self._kill_at = now + _TERM_TO_KILL
        if now >= self._kill_at:
            self._kill_at = now + 0.2  # again, in case a new process has started meanwhile
            self._kill_everything()

    def _somebody_is_falling(self) -> bool:
        recent = time.monotonic() - 5.0
        return any(worker.alive and (worker.tail.traceback_at or 0) > recent for worker in self._workers)

    def _reasons(self) -> list[WorkerProcess]:
        """Returns the failed workers that did not fail because they lost another worker."""
        return [worker for worker in self._failures if not worker.tail.has_lost_another]

    def _judge(self) -> None:
        """Finds the worker that failed first."""
        self._judge_at = _FOREVER
        if not self._failures or self._outcome.failed is not None or self._ending:
            return
        self._ending = True
        own_fault = [worker for worker in self._failures if -(worker.exit_code or 0) in _OWN_FAULT]
        frozen = [worker for worker in self._workers if worker.alive and linux.is_stopped(worker.pid)]
        first = (own_fault or frozen or [min(self._reasons() or self._failures, key=_failed_at)])[0]
        self._outcome.failed = first
        first.frozen = first in frozen
        gone = {id(worker) for worker in (*own_fault, *frozen)}
        if (first.exit_code or 0) < 0 or first.exit_code == liveness.STALLED:
            gone.add(id(first))
        self._outcome.lost = len(gone)

    def _signal_all(self, signum: int) -> None:
        for worker in self._workers:
            if worker.alive:
                linux.send(worker.pid, signum, group=True)

    def _members(self) -> set[int]:
        alive = {worker.pid for worker in self._workers if worker.alive}
        roots = {os.getpid()} if self._whole_tree else alive
        return alive | linux.descendants(roots) | linux.members_of_job(self._plan.job_id)

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
        patience = time.monotonic() + (0.3 if alone and not any(w.alive for w in self._workers) else 0.0)
        give_up = time.monotonic() + 3.0
        while time.monotonic() < give_up:
            # The system can reuse the PID of a reaped worker, so only live workers get signals.
            left = self._members() if any(w.process for w in self._workers) else set()
            if not left and not any(worker.alive for worker in self._workers):
                break
            if time.monotonic() >= patience:
                self._kill_everything()
            self._step(0.02)
            self._reap()
        drained = time.monotonic() + 0.5
        while any(worker.channels for worker in self._workers) and time.monotonic() < drained:
            self._step(0.02)
        for worker in self._workers:
            worker.close()
        self._reap()
        self._selector.close()

    def _reap(self) -> None:
        if self._whole_tree:
            linux.reap_orphans(worker.pid for worker in self._workers if worker.alive)

    # Signals to the launcher itself.

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Returns a context manager that passes Ctrl-C, SIGTERM and SIGHUP on to the workers.

        It has no effect outside the main thread, because Python allows signal handlers only there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, None)
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {signum: signal.signal(signum, lambda *_: None) for signum in signals}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

        def gives_up() -> bool:
            self._on_signals(ours)
            return time.monotonic() >= self._discard_at

        self._set_gives_up(gives_up)
        try:
            yield
        finally:
            self._set_gives_up(None)
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._on_signals(ours)  # a signal since the last step
            ours.close()
            theirs.close()

    def _set_gives_up(self, function: Callable[[], bool] | None) -> None:
        # Otherwise, a signal would have no effect while no program reads the output, as in `| sleep 60`.
        for sink in {sink for worker in self._workers for sink in worker.sinks}:
            sink.gives_up = function

    def _on_signals(self, connection: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            for signum in connection.recv(64):
                if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        self._discard_at = min(self._discard_at, time.monotonic() + self._grace)
        if self._outcome.interrupted is not None or self._outcome.failed is not None:
            if signum == signal.SIGINT:
                self._kill_at = self._discard_at = 0.0  # the second Ctrl-C
            if self._outcome.interrupted is None:
                self._outcome.stopped = signum
            return
        self._outcome.interrupted = signum
        self._ending = True
        self._judge_at = _FOREVER
        self._kill_at = time.monotonic() + self._grace
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        self._signal_all(signum)


def _failed_at(worker: WorkerProcess) -> float:
    """Returns the time of a failure. A worker prints its traceback before its libraries have shut down."""
    printed = worker.tail.traceback_at
    return printed if printed is not None and worker.exited_at - printed < 5.0 else worker.exited_at
