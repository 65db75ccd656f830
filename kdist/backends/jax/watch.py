"""`Watch`: makes JAX raise an error, or ends the process, after the loss of a worker.

If a worker dies, JAX behaves as follows. gloo's collectives fail at once with "Connection reset by peer",
which names no worker. NCCL's collectives hang, and gloo's hang if a worker is stopped. If the chief dies, which
hosts the coordination service, JAX aborts the other workers from C++ within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from kdist import handlers
from kdist.cluster import Cluster, logs, timeouts
from kdist.control import loss_reasons, stalls
from kdist.control.channel import NOTICE_SECONDS, Channel
from kdist.control.loss_reasons import Loss

# Shares of the heartbeat timeout: the time for the main thread to raise an error after the loss of a worker,
# before the process is terminated; and the time to wait for a worker that has ended normally, whose last
# collectives end soon, or never.
_GRACE, _LEAST_GRACE = 0.2, 2.0
_UNANSWERED = 0.55
# Seconds of grace after a worker was stopped. Its sockets stay open, so collectives that need it never fail.
_STOPPED_GRACE = 1.0
# Seconds for which a failed chief serves the others, so that they can report the reason.
_FAREWELL = 10.0
# Seconds for the destructors of C++ after the loss of a worker. They can wait for a collective that never ends.
_DESTRUCTION = 5
# Seconds in which the sockets of a killed process close, one after the other.
_CLOSING = 2.0

_CHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[object] = []  # C code calls or owns these until the process ends


def has_started() -> bool:
    """Returns whether JAX has started its backends. After that, no worker can join."""
    from jax._src import xla_bridge  # no public function returns this without starting them

    return bool(xla_bridge.backends_are_initialized())


def service_client() -> Any:
    """Returns this process's client of JAX's coordination service (its key-value store and heartbeats)."""
    from jax._src import distributed  # Orbax also uses it; there is no public function

    return distributed.global_state.client


class Watch:
    """Monitors the main thread after the loss of a worker, and the end of the process. All workers have joined."""

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self._cluster = cluster
        self._channel = channel
        self._timeout = timeouts.heartbeat_timeout()
        self._working = 0
        self._entered = 0.0  # when the main thread began to wait for other workers
        self._monitors = False  # after the first loss
        self._explained = False  # the user gets an error about the lost worker
        self._leaving = False
        self._aborted = threading.Event()
        self._catch_abort()
        channel.on_loss(self._note)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A context in which the main thread may wait for other workers."""
        self._entered = time.monotonic()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def check(self, tells: bool = True) -> None:
        """Raises an error if a worker is lost.

        Set `tells=False` in a thread of a collective. The user sees its error later or never.
        """
        if lost := self._causes():
            self._explained |= tells
            raise self._channel.lost_error(lost)

    def has_told(self) -> None:
        """Records that an error about a lost worker reaches the user."""
        self._explained = True

    def explain(self, error: BaseException) -> BaseException:
        """Waits until the lost worker is known, and returns an error that names it.

        If no worker is lost, returns the original error, because the user's code may also use a network.
        """
        lost = self._channel.wait_for_loss(NOTICE_SECONDS)
        if not lost:
            return error
        self._explained = True
        return self._channel.lost_error(lost, error)

    def _causes(self) -> dict[int, str]:
        lost = self._channel.lost
        return loss_reasons.first_cause({index: loss for index, loss in lost.items() if loss.is_cause})

    def _note(self, index: int, loss: Loss) -> None:
        if index == 0 and loss.is_cause and not self._leaving:
            _abandon_client()
        if not self._monitors:
            self._monitors = True
            threading.Thread(target=self._monitor, name="kdist watch", daemon=True).start()

    def _monitor(self) -> None:
        """Terminates the process if its main thread waits in C++ for workers that are lost or have ended."""
        since: dict[int, float] = {}
        while not self._explained and not self._leaving:
            now = time.monotonic()
            for index, loss in self._channel.lost.items():
                noted = since.setdefault(index, now)
                if loss.kind == loss_reasons.STOPPED:
                    is_late = now - noted > _STOPPED_GRACE
                elif loss.is_cause:
                    is_late = now - noted > max(_LEAST_GRACE, self._timeout * _GRACE)
                else:  # the worker that a `LOST_ANOTHER` lost is detected soon
                    waits = now - max(noted, self._entered)
                    is_late = loss.kind == loss_reasons.ENDED and waits > self._timeout * _UNANSWERED
                if is_late and self._working:
                    self._end()
            time.sleep(0.2)

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            lost = self._channel.wait_for_loss(0.0)
            print(f"kdist: {self._channel.lost_error(lost)}", file=sys.stderr, flush=True)
            stalls.print_stack()
            sys.stdout.flush()
            self._channel.leave(
                Loss(loss_reasons.LOST_ANOTHER, loss_reasons.REASONS[loss_reasons.LOST_ANOTHER])
            )
        os._exit(1)

    # The abort from C++ ----------------------------------------------------------------------------------

    def _catch_abort(self) -> None:
        """Catches the abort with which JAX terminates this process when the chief is lost.

        JAX accepts a callback instead, but the conversion of its argument to Python fails (std::bad_cast,
        jaxlib 0.10.2). A handler set with Python's `signal` module would only run in the main thread.
        """
        handler = _CHandler(self._on_abort)
        _kept.append(handler)
        self._earlier_handler = _libc().signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def _on_abort(self, number: int) -> None:
        if self._leaving and 0 not in self._causes():  # the chief left first, and no worker is lost
            os._exit(0 if loss_reasons.of_this_process().kind == loss_reasons.ENDED else 1)
        deadline = time.monotonic() + _CLOSING
        while not self._cluster.is_chief and 0 not in self._channel.lost and time.monotonic() < deadline:
            time.sleep(0.1)
        chief = self._channel.lost.get(0)
        if chief is None:  # the abort has another cause
            if self._earlier_handler not in (None, 0, 1):
                _CHandler(self._earlier_handler)(number)
            return
        _abandon_client()
        self._aborted.set()
        # The main thread raises the error of the collective. A return from this handler would abort.
        deadline = time.monotonic() + self._timeout * _GRACE
        while not self._explained:
            if time.monotonic() > deadline:
                self._end()
            time.sleep(0.1)
        while True:  # in C, because the interpreter may have ended when the thread wakes
            _libc().sleep(1_000_000)

    # The end of the process ------------------------------------------------------------------------------

    def leave(self) -> None:
        """Announces the end of this worker. The chief waits for the others, which need its service."""
        self._leaving = True
        chief = self._channel.lost.get(0)
        if chief is not None and chief.is_cause:
            self._aborted.wait(_CLOSING)  # JAX tries to abort once; `_on_abort` stops it
            _abandon_client()  # its destructor would wait for an answer of the chief
        else:
            self._channel.leave()
            if self._cluster.is_chief:
                has_failed = loss_reasons.of_this_process().kind != loss_reasons.ENDED
                self._wait_for_others(_FAREWELL if has_failed else None)
                time.sleep(0.3)  # the others disconnect next
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.distributed.shutdown()
        # C code must not call Python after the interpreter has ended. If a worker is lost, C++ threads may
        # still wait for answers, and abort the process if they wake too late. Then the process just exits.
        libc = _libc()
        end = ctypes.cast(libc._exit, ctypes.c_void_p) if self._causes() else None
        libc.signal(signal.SIGABRT, end)
        if end is not None:
            libc.signal(signal.SIGALRM, end)
            handlers.call_last(functools.partial(signal.alarm, _DESTRUCTION))

    def _wait_for_others(self, limit: float | None) -> None:
        began = time.monotonic()
        warns = True
        while left := set(range(1, self._cluster.num_workers)) - set(self._channel.lost):
            waited = time.monotonic() - began
            if limit is not None and waited > limit:
                return
            if waited > 10 and warns:
                warns = False
                names = ", ".join(self._cluster.worker_names[index] for index in sorted(left))
                logs.logger.warning("waiting for %s to end: if it hangs, terminate it", names)
            time.sleep(0.02)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return libc


def _abandon_client() -> None:
    """Makes JAX forget its client without its destructor, because both would wait for a lock that is held."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        distributed.global_state.client = None
