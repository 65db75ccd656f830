"""Watches over the workers of this machine: passes on output and signals, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kdist.cluster import liveness
from kdist.launch import linux
from kdist.launch.plan import JobPlan
from kdist.launch.worker_process import WorkerProcess

# A worker that loses a peer fails within milliseconds of it. Exits this close together are judged together.
_WINDOW = 0.2
_LONGER_WINDOW = 0.4  # for a worker that has printed its traceback already and is still shutting down
_LONGEST_WINDOW = 0.6  # for one that leaves in good order, which takes longer than the others to notice it
_TERM_TO_KILL = 0.3  # together with the window, the rest of a failed job is ended within a second
_FOREVER = float("inf")
# Nobody gets these from a peer that went away, so whoever did was first.
_OWN_FAULT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclasses.dataclass
class Outcome:
    """How a job ended on this machine."""

    failed: WorkerProcess | None = None
    lost: int = 0  # workers that were killed, or did not move any more
    lost_server: WorkerProcess | None = None
    interrupted: int | None = None
    unfinished: list[WorkerProcess] = dataclasses.field(default_factory=list)  # when the time was up


class Supervisor:
    """Starts workers, waits for them, and ends all of them when one fails.

    Args:
        workers: The workers, not yet started.
        plan: The job's plan, with the number by which stray descendants are found.
        grace: How many seconds workers may take to end after a signal was passed on to them.
        timeout: How many seconds the whole job may take.
        whole_tree: Whether every descendant of this process belongs to the job. True for the command line,
            false where user code runs in this process too.
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
        self._judge_at = self._kill_at = self._deadline = _FOREVER
        self._ending = False

    def run(self) -> Outcome:
        """Runs the job to its end. Every process of it has ended by then, grandchildren included."""
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
        """How long to sleep if nothing happens."""
        until = min(self._judge_at, self._kill_at, self._deadline)
        if any(worker.alive and worker.pidfd is None for worker in self._workers):
            until = min(until, time.monotonic() + 0.02)
        if any(line.waits() for worker in self._workers for line in worker.lines()):
            until = min(until, time.monotonic() + 0.25)
        return None if until == _FOREVER else max(0.01, until - time.monotonic())

    def _step(self, patience: float | None) -> None:
        """Waits for something to happen and notes it, in the order in which the system tells it."""
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
        # Unregistered first: read() closes the descriptor when the stream has ended.
        self._selector.unregister(fd)
        if worker.read(fd):
            self._selector.register(fd, selectors.EVENT_READ, worker)

    def _note_exit(self, worker: WorkerProcess) -> None:
        if worker.collect() and not self._ending:
            self._on_exit(worker)

    def _on_exit(self, worker: WorkerProcess) -> None:
        if worker.exit_code == 0:
            return
        # Those that are preempted leave together, once the slowest has saved its share.
        window = self._grace if worker.exit_code == liveness.PREEMPTED else _WINDOW
        if not self._failures or window == _WINDOW:
            self._judge_at = min(self._judge_at, time.monotonic() + window)
        self._failures.append(worker)

    def _act(self) -> None:
        """Does what is due."""
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
            self._kill_at = now + 0.2  # again, should something have been started meanwhile
            self._kill_everything()

    def _somebody_is_falling(self) -> bool:
        recent = time.monotonic() - 5.0
        return any(worker.alive and (worker.tail.traceback_at or 0) > recent for worker in self._workers)

    def _reasons(self) -> list[WorkerProcess]:
        """Those that have failed for another reason than that another one had ended."""
        return [worker for worker in self._failures if not worker.tail.has_lost_another]

    def _judge(self) -> None:
        """Decides which worker failed first."""
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
        """Ends what is still there, reads what is still in the pipes, and collects the dead."""
        self._ending = True
        alone = self._outcome.failed is None and self._outcome.interrupted is None
        # After a success, helpers (multiprocessing's resource tracker) get a moment to clean up.
        patience = time.monotonic() + (0.3 if alone and not any(w.alive for w in self._workers) else 0.0)
        give_up = time.monotonic() + 3.0
        while time.monotonic() < give_up:
            # Once a worker's pid is collected it may belong to somebody else; only live ones are signalled.
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
        """Passes Ctrl-C, SIGTERM and SIGHUP on to the workers while the block runs.

        It does nothing outside the main thread, where Python allows no signal handlers.
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
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            ours.close()
            theirs.close()

    def _on_signals(self, connection: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            for signum in connection.recv(64):
                if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        if self._outcome.interrupted is not None or self._outcome.failed is not None:
            if signum == signal.SIGINT:
                self._kill_at = 0.0  # the second Ctrl-C
            return
        self._outcome.interrupted = signum
        self._ending = True
        self._judge_at = _FOREVER
        self._kill_at = time.monotonic() + self._grace
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        self._signal_all(signum)


def _failed_at(worker: WorkerProcess) -> float:
    """When a worker failed: its traceback is printed before its libraries have shut down."""
    printed = worker.tail.traceback_at
    return printed if printed is not None and worker.exited_at - printed < 5.0 else worker.exited_at
