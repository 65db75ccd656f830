"""`Watch`: detects and names lost workers, and prevents other workers from waiting for them forever.

If a worker dies, JAX behaves as follows. gloo's collectives fail at once with "Connection reset by peer",
which names no worker. NCCL's collectives hang. The coordination service detects missing heartbeats. If the
chief dies, which hosts this service, JAX aborts the other workers from C++ within milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from kdist.backends import stalls
from kdist.backends.store import Store
from kdist.cluster import Cluster, liveness, logs, split_address
from kdist.errors import WorkerLostError

# Shares of the heartbeat timeout: the time for the main thread to raise an error after the loss of a worker,
# before the process is terminated; and the time to find the lost worker, which the service names after 0.5.
_GRACE, _LEAST_GRACE = 0.2, 2.0
_NAMING = 0.85
# How long to wait for a worker that has ended normally. Its last collectives end soon, or never.
_UNANSWERED = 0.55
# Seconds for which a failed chief serves the others, so that they can read the reason.
_FAREWELL = 10.0
# Seconds in which the sockets of a killed process close, one after the other.
_CLOSING = 2.0
# The server is C++ code and answers at once, even if the main thread of its process is blocked.
_ANSWER = 0.1  # a share of the heartbeat timeout
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and no settings
_FAILED = "it failed"
_HUNG = "it hung"
# Seconds for which a hung chief serves the others, so that they can read its message.
_LAST_WORDS = 1.5
_LOST_ANOTHER = "it lost another worker"
# The error of a sum in shared memory. A worker that ends sends its last message before or soon after it closes.
_CLOSED = re.compile(r"worker (\d+) closed the connection")
_LAST_MESSAGE = 0.3

_CHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[object] = []  # C code calls or owns these until the process ends


def has_started() -> bool:
    """Returns whether JAX has started its backends. After that, no worker can join."""
    from jax._src import xla_bridge  # no public function returns this without starting them

    return bool(xla_bridge.backends_are_initialized())


def service_client() -> Any:
    """Returns this process's client of JAX's coordination service (its key-value store and liveness)."""
    from jax._src import distributed  # Orbax also uses it; there is no public function

    return distributed.global_state.client


class Watch:
    """Monitors the other workers of a cluster, in a separate thread and at the end of the process.

    All workers have joined, and each one writes the reason why it ends to the store.
    """

    def __init__(self, cluster: Cluster, client: Any, store: Store) -> None:
        self._cluster = cluster
        self._timeout = liveness.heartbeat_timeout()
        self._client = client
        self._store = store
        self._others = [i for i in range(cluster.num_workers) if i != cluster.worker_index]
        self._lost: dict[int, str] = {}  # worker -> reason
        self._gone: set[int] = set()  # lost workers, and workers that have ended normally
        self._working = 0
        self._entered = 0.0  # when the main thread began to wait for other workers
        self._watching = True
        self._explained = False  # the user gets an error about the lost worker
        self._leaving = False
        self._aborted = threading.Event()
        self._changed = threading.Condition()
        # Registered after JAX's own handler, so called before it.
        atexit.register(self._leave)
        self._catch_abort()
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="kdist watch", daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A context in which the main thread may wait for other workers."""
        self._entered = time.monotonic()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    @property
    def lost(self) -> frozenset[int]:
        """The workers that are known to be lost."""
        return frozenset(self._lost)

    def check(self, index: int | None = None, tells: bool = True) -> None:
        """Raises an error if a worker is lost, or if the worker with this index has ended.

        Set `tells=False` in a thread that gathers messages. The user sees its error later or never, because
        the main thread may be in a collective that hangs.
        """
        culprits = dict(self._lost)
        if not culprits and index not in (None, self._cluster.worker_index):
            culprits = self._culprits_among([index])
        if culprits:
            self._explained |= tells
            raise self._error(culprits, None)

    def has_told(self) -> None:
        """Records that an error about a lost worker reaches the user."""
        self._explained = True

    def explain(self, error: BaseException, tells: bool = True) -> BaseException:
        """Waits until the lost worker is known, and returns an error that names it; for `tells`, see `check`.

        If no worker is lost, returns the original error, because the user's code may also use a network.
        """
        deadline = time.monotonic() + self._timeout * _NAMING
        ended: dict[int, str] = {}
        # In a separate thread, because a dying chief never answers a request.
        threading.Thread(
            target=self._ask, args=(ended, deadline), name="kdist watch: ask", daemon=True
        ).start()
        closed = _CLOSED.search(str(error))
        while not (self._lost or ended) and time.monotonic() < deadline:
            if not self._chief_answers():
                self._note(0, stalls.DIED)
            with self._changed:
                self._changed.wait(0.1)
            if closed and time.monotonic() > deadline - self._timeout * _NAMING + _LAST_MESSAGE:
                self._note_left(int(closed[1]))
        culprits = dict(self._lost) or ended
        if not culprits:
            return error
        self._explained |= tells
        return self._error(culprits, error)

    def _ask(self, ended: dict[int, str], deadline: float) -> None:
        while not (ended or self._lost or self._leaving) and time.monotonic() < deadline:
            ended.update(self._culprits_among(self._others))
            time.sleep(0.1)

    def _error(self, culprits: dict[int, str], error: BaseException | None) -> WorkerLostError:
        return stalls.lost_error(self._cluster.worker_names, self._cluster.worker_index, culprits, error)

    # Noticing --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        everyone = list(range(self._cluster.num_workers))
        pause = max(1.0, len(everyone) / 100)
        ended: dict[int, str] = {}  # workers that have ended normally
        while self._watching:
            try:
                # Waits for the watch threads of all live workers, even if their main threads are blocked.
                # The result omits workers whose heartbeats, which need no Python, have stopped.
                live = self._client.get_live_nodes(everyone)
            except jax.errors.JaxRuntimeError:
                if self._leaving or not self._chief_answers():
                    self._note(0, stalls.DIED)
                    return
                time.sleep(0.2)  # its sockets close one after the other
                continue
            for index in set(self._others) - set(live) - self._gone:
                said = self._note_left(index)
                if said not in (None, _LOST_ANOTHER):  # the worker that it lost is detected soon
                    ended[index] = said
                self._gone.add(index)
            # A chief that has ended stays alive, because other workers need its service.
            if 0 not in ended and not self._cluster.is_chief and (said := self._said(0)) is not None:
                ended[0] = said
                if said.startswith(_HUNG):
                    self._note(0, said)
                    return
            self._note_unanswered(ended)
            time.sleep(pause)

    def _note_left(self, index: int) -> str | None:
        """Notes a worker that has left as lost unless its last message has another reason, which this returns."""
        said = self._said(index)
        if said is None or said.startswith((_FAILED, _HUNG)):
            self._note(index, said or stalls.DIED)
            return None
        return said

    def _note_unanswered(self, ended: dict[int, str]) -> None:
        """Terminates this process if it has waited too long for workers that have ended."""
        if ended and self._working and time.monotonic() - self._entered > self._timeout * _UNANSWERED:
            self._say(_LOST_ANOTHER)
            self._end(ended)

    def _said(self, index: int, seconds: float = 0.0) -> str | None:
        """Returns the message of a worker that has left; `None` if it is alive, or died without a message."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if 0 not in self._lost and (said := self._store.get(_farewell_key(index), seconds)):
                return said.decode()
        return None

    def _culprits_among(self, indices: Sequence[int]) -> dict[int, str]:
        """Returns workers that failed, or else workers that ended, but not because of another worker."""
        left = {index: said for index in indices if (said := self._said(index)) is not None}
        left = {index: what for index, what in left.items() if what != _LOST_ANOTHER}
        return {index: what for index, what in left.items() if what.startswith((_FAILED, _HUNG))} or left

    def _chief_answers(self) -> bool:
        if self._cluster.is_chief or 0 in self._lost:
            return self._cluster.is_chief
        try:
            with socket.create_connection(
                split_address(_coordinator()), timeout=self._timeout * _ANSWER
            ) as connection:
                # The kernel also accepts connections for a stopped process, but only a live server replies.
                connection.sendall(_HTTP2_GREETING)
                return bool(connection.recv(1))
        except OSError:
            return False

    def _note(self, index: int, what: str) -> None:
        with self._changed:
            if index in self._lost or self._leaving:
                return
            self._lost[index] = what
            self._gone.add(index)
            self._changed.notify_all()
        if index == 0:
            _abandon_client()
        self._start(self._enforce)

    def _enforce(self) -> None:
        time.sleep(max(_LEAST_GRACE, self._timeout * _GRACE))
        while not self._explained and not self._leaving:
            if self._working:
                self._end(self._lost)
            time.sleep(0.5)

    def _end(self, culprits: dict[int, str]) -> None:
        """Terminates the process, because its main thread waits in C++ for a worker that is lost."""
        with contextlib.suppress(Exception):
            print(f"kdist: {self._error(dict(culprits), None)}", file=sys.stderr, flush=True)
            stalls.print_stack()
            sys.stdout.flush()
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
        if self._leaving and 0 not in self._lost:  # the chief left first, and no worker is lost
            os._exit(1 if _uncaught() else 0)
        deadline = time.monotonic() + _CLOSING
        while (
            (answers := self._chief_answers()) and not self._cluster.is_chief and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        if answers:  # the abort has another cause
            if self._earlier_handler not in (None, 0, 1):
                _CHandler(self._earlier_handler)(number)
            return
        self._note(0, stalls.DIED)
        self._aborted.set()
        # The main thread raises the error of the collective. A return from this handler would abort.
        deadline = time.monotonic() + self._timeout * _GRACE
        while not self._explained:
            if time.monotonic() > deadline:
                self._end(self._lost)
            time.sleep(0.1)
        while True:  # in C, because the interpreter may have ended when the thread wakes
            _libc().sleep(1_000_000)

    # The end of the process ------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Announces the end of this worker. The chief waits for the others, which need its service."""
        self._leaving = True
        if 0 in self._lost:
            self._aborted.wait(_CLOSING)  # JAX tries to abort once; `_on_abort` stops it
        else:
            error = _uncaught()
            what = stalls.ENDED if error is None else f"{_FAILED}: {error}"
            if error is not None and self._explained:
                what = _LOST_ANOTHER
            self._say(what)
            if self._cluster.is_chief:
                self._wait_for_others(_FAREWELL if error else None)
                time.sleep(0.3)  # the others disconnect next
            self._watching = False
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.distributed.shutdown()
            for thread in self._threads:
                thread.join(3.0)
        # C code must not call Python after the interpreter has ended. If a worker is lost, C++ threads may
        # still wait for answers, and abort the process if they wake too late. Then the process just exits.
        libc = _libc()
        end = ctypes.cast(libc._exit, ctypes.c_void_p) if self._lost else None
        libc.signal(signal.SIGABRT, end)

    def _say(self, what: str) -> None:
        """Stores the reason why this worker ends, for the other workers."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(_farewell_key(self._cluster.worker_index), what.encode(errors="backslashreplace"))

    def say_hung(self, what: str) -> None:
        """Announces why this worker ends. A chief then waits, so that the others can read the reason."""
        self._say(what)
        if self._cluster.is_chief:
            time.sleep(_LAST_WORDS)

    def _wait_for_others(self, limit: float | None) -> None:
        began = time.monotonic()
        told = False
        for index in self._others:
            while index not in self._gone and self._said(index, 0.5) is None:
                waited = time.monotonic() - began
                if limit is not None and waited > limit:
                    return
                if waited > 10 and not told:
                    told = True
                    logs.logger.warning(
                        "waiting for %s to end: if it hangs, terminate it", self._cluster.worker_names[index]
                    )


def _farewell_key(index: int) -> str:
    return f"kdist/farewell/{index}"


def _uncaught() -> str | None:
    """Returns the error that ends this process, in one line, or `None`."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # errors do not end an interactive session
        return None
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return libc


def _coordinator() -> str:
    from jax._src import distributed

    return str(distributed.global_state.coordinator_address)


def _abandon_client() -> None:
    """Makes JAX forget its client without its destructor, because both would wait for a lock that is held."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        distributed.global_state.client = None
