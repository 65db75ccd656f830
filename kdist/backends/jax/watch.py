"""`Watch`: notices that a worker is gone, says which, and sees to it that nobody waits for it forever.

What JAX does by itself when a worker dies: gloo's collectives fail at once with "Connection reset by peer",
which names nobody; NCCL's wait; the coordination service learns of it from missing heartbeats; and where the
chief dies, which hosts that service, the others are aborted from C++ within milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
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

# Shares of the heartbeat timeout. How long the main thread has to raise an error after a worker is known to be
# lost, before the process ends; and how long an error waits for a name, which the service knows after 0.5.
_GRACE, _LEAST_GRACE = 0.2, 2.0
_NAMING = 0.85
# How long a worker that has ended in good order may be waited for: what it took part in ends soon, or never.
_UNANSWERED = 0.55
# How long a chief that has failed serves the others, so that they can read why.
_FAREWELL = 10.0
# How long the sockets of a process that was killed may take to close, one after the other.
_CLOSING = 2.0
# A server is C++ and answers at once, whatever its main thread does.
_ANSWER = 0.1  # a share of the heartbeat timeout
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and no settings
_FAILED = "it failed"
_HUNG = "it hung"
# How long a chief that has hung serves the others, so that they can read it.
_LAST_WORDS = 1.5
_LOST_ANOTHER = "it lost another worker"

_CHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[Any] = []  # C code calls or owns these until the process ends


def has_started() -> bool:
    """Says whether JAX has started its backends, after which no worker can join."""
    from jax._src import xla_bridge  # no public function says so without starting them

    return bool(xla_bridge.backends_are_initialized())


def service_client() -> Any:
    """Returns this process's client of JAX's coordination service (its key-value store and liveness)."""
    from jax._src import distributed  # where JAX's own libraries (Orbax) take it from; there is no public way

    return distributed.global_state.client


class Watch:
    """Watches over the other workers of a cluster, from a thread of its own and at the end of the process.

    They have been joined, and say in the store why they end.
    """

    def __init__(self, cluster: Cluster, client: Any, store: Store) -> None:
        self._cluster = cluster
        self._timeout = liveness.heartbeat_timeout()
        self._client = client
        self._store = store
        self._others = [i for i in range(cluster.num_workers) if i != cluster.worker_index]
        self._lost: dict[int, str] = {}  # worker -> what happened to it
        self._gone: set[int] = set()  # these, and those that have ended in good order
        self._working = 0
        self._entered = 0.0  # when the main thread began to wait for others
        self._watching = True
        self._explained = False  # the user has been told
        self._leaving = False
        self._aborted = threading.Event()
        self._changed = threading.Condition()
        # Registered after JAX's own handler, so called before it.
        atexit.register(self._leave)
        self._catch_abort()
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, name="kdist watch", daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Entered while the main thread may wait for other workers."""
        self._entered = time.monotonic()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    @property
    def lost(self) -> frozenset[int]:
        """The workers that have been noticed to be lost."""
        return frozenset(self._lost)

    def check(self, index: int | None = None, tells: bool = True) -> None:
        """Raises if a worker is lost, or if the one that is waited for has ended.

        The error `tells` the user, unless it is of a thread that gathers messages. That does so later or never: the
        main thread may be in a collective that does not end.
        """
        culprits = dict(self._lost)
        if not culprits and index not in (None, self._cluster.worker_index):
            culprits = self._culprits_among([index])
        if culprits:
            self._explained |= tells
            raise self._error(culprits, None)

    def has_told(self) -> None:
        """Notes that the user is told that a worker is lost, whose turn it is."""
        self._explained = True

    def explain(self, error: BaseException, tells: bool = True) -> BaseException:
        """Waits until it is known who was lost, and returns the error that says so; `tells` as in `check`.

        Where nobody is, the error is this worker's own, whatever its words: the user's code may use a network, too.
        """
        deadline = time.monotonic() + self._timeout * _NAMING
        ended: dict[int, str] = {}
        # Not in this thread: a question to a chief that is dying is never answered.
        threading.Thread(
            target=self._ask, args=(ended, deadline), name="kdist watch: ask", daemon=True
        ).start()
        while not (self._lost or ended) and time.monotonic() < deadline:
            if not self._chief_answers():
                self._note(0, stalls.DIED)
            with self._changed:
                self._changed.wait(0.1)
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
        ended: dict[int, str] = {}  # those who have left in good order
        while self._watching:
            try:
                # Waits for the watches of all who are alive, whatever their main threads do, and answers
                # without those whose heartbeats (which need no Python) have stopped.
                live = self._client.get_live_nodes(everyone)
            except jax.errors.JaxRuntimeError:
                if self._leaving or not self._chief_answers():
                    self._note(0, stalls.DIED)
                    return
                time.sleep(0.2)  # its sockets close one after the other
                continue
            for index in set(self._others) - set(live) - self._gone:
                said = self._said(index)
                if said is None or said.startswith((_FAILED, _HUNG)):
                    self._note(index, said or stalls.DIED)
                elif said != _LOST_ANOTHER:  # else the one that it has lost is noticed soon
                    ended[index] = said
                self._gone.add(index)
            # A chief that has ended is still alive, for the sake of those who need its service.
            if 0 not in ended and not self._cluster.is_chief and (said := self._said(0)) is not None:
                ended[0] = said
                if said.startswith(_HUNG):
                    self._note(0, said)
                    return
            self._note_unanswered(ended)
            time.sleep(pause)

    def _note_unanswered(self, ended: dict[int, str]) -> None:
        """Gives up waiting for workers that have ended and will not answer."""
        if ended and self._working and time.monotonic() - self._entered > self._timeout * _UNANSWERED:
            self._say(_LOST_ANOTHER)
            self._end(ended)

    def _said(self, index: int, seconds: float = 0.0) -> str | None:
        """What a worker said when it left; `None` if it is there, or died without a word."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if 0 not in self._lost and (said := self._store.get(_farewell_key(index), seconds)):
                return said.decode()
        return None

    def _culprits_among(self, indices: Sequence[int]) -> dict[int, str]:
        """Those who have left and not because of another: who failed, else who ended."""
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
                # Of a process that was stopped, the kernel accepts connections; a gRPC server greets as well.
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
        """Ends the process: its main thread waits, in C++, for a worker that will not come."""
        with contextlib.suppress(Exception):
            print(f"kdist: {self._error(dict(culprits), None)}", file=sys.stderr, flush=True)
            stalls.print_stack()
            sys.stdout.flush()
        os._exit(1)

    # The abort from C++ ----------------------------------------------------------------------------------

    def _catch_abort(self) -> None:
        """Catches the abort with which JAX ends this process when the chief is lost.

        JAX can be given a function to call instead, but the conversion of its argument to Python fails
        (std::bad_cast, jaxlib 0.10.2). A handler in Python's `signal` would only run in the main thread.
        """
        handler = _CHandler(self._on_abort)
        _kept.append(handler)
        self._earlier_handler = _libc().signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def _on_abort(self, number: int) -> None:
        if self._leaving and 0 not in self._lost:  # the chief was faster to leave: nothing is lost
            os._exit(1 if _uncaught() else 0)
        deadline = time.monotonic() + _CLOSING
        while (
            (answers := self._chief_answers()) and not self._cluster.is_chief and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        if answers:  # an abort of another kind
            if self._earlier_handler not in (None, 0, 1):
                _CHandler(self._earlier_handler)(number)
            return
        self._note(0, stalls.DIED)
        self._aborted.set()
        # The main thread gets an error from the collective and raises it. To return means to abort.
        deadline = time.monotonic() + self._timeout * _GRACE
        while not self._explained:
            if time.monotonic() > deadline:
                self._end(self._lost)
            time.sleep(0.1)
        while True:  # in C, so that the thread does not wake in an interpreter that is gone
            _libc().sleep(1_000_000)

    # The end of the process ------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Says goodbye; the chief waits for the others, since they need the service that it hosts."""
        self._leaving = True
        if 0 in self._lost:
            self._aborted.wait(_CLOSING)  # JAX tries to abort once, and is held
        else:
            error = _uncaught()
            what = "it ended before the others" if error is None else f"{_FAILED}: {error}"
            if error is not None and self._explained:
                what = _LOST_ANOTHER
            self._say(what)
            if self._cluster.is_chief:
                self._wait_for_others(_FAREWELL if error else None)
                time.sleep(0.3)  # they disconnect next
            self._watching = False
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.distributed.shutdown()
            for thread in self._threads:
                thread.join(3.0)
        # No Python may be called from C once the interpreter is gone. Where a worker is lost, threads may still
        # wait for answers in C++, and would abort the process if they wake too late: it is to end anyway.
        libc = _libc()
        end = ctypes.cast(libc._exit, ctypes.c_void_p) if self._lost else None
        libc.signal(signal.SIGABRT, end)

    def _say(self, what: str) -> None:
        """Leaves word for the others why this worker ends."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(_farewell_key(self._cluster.worker_index), what.encode(errors="backslashreplace"))

    def say_hung(self, what: str) -> None:
        """Tells the others why this worker ends; a chief stays until they can have read it."""
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
    """The error that ends this process, in one line."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # interactive: errors end nothing
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
    """Lets JAX forget its client, without running its destructor: both would wait for a lock that is held."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        distributed.global_state.client = None
