"""A connection from each worker to the chief that detects immediately which worker has died.

PyTorch's store and collectives do not name the lost worker (gloo), or wait for half an hour (NCCL, or if a
host loses power). The kernel is faster. It closes the sockets of a process that dies, and its keep-alive
probes detect a host that vanishes. A suspended process (SIGSTOP) keeps its sockets, but sends no more
heartbeats. This module uses only the standard library, and never unpickles data from the network.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from kdist.backends import stalls
from kdist.backends.activity import is_stopped
from kdist.cluster import handshake, liveness

_MESSAGE = struct.Struct("!4scI")
_MAGIC = b"kdl1"
_PURPOSE = "lifeline"
_BEAT, _DIED, _FROZEN, _HUNG, _FAILED, _ENDED = b"B", b"D", b"Z", b"S", b"F", b"E"
_WORDS = {
    _FROZEN: "it does not run: a signal such as SIGSTOP stopped it, or its machine is frozen",
    _HUNG: "it hung",
    _DIED: "it died or is unreachable",
    _FAILED: "it failed with an error",
    _ENDED: stalls.ENDED,
}
_LOST = (_DIED, _FROZEN, _HUNG)
# Shares of the heartbeat timeout: between two heartbeats, and without heartbeats on the same and on another
# machine. A C call that holds the GIL also stops heartbeats. On the same machine, the kernel shows the cause.
_BEATS, _SILENCE, _SILENCE_ELSEWHERE = 0.1, 0.6, 4.0


class Lifeline:
    """The connections of one worker: to all other workers from the chief, or to the chief."""

    def __init__(self, worker_index: int, connections: Mapping[int, socket.socket]) -> None:
        self._index = worker_index
        self._connections = dict(connections)
        self._received = dict.fromkeys(connections, b"")
        self._losses: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._timeout = liveness.heartbeat_timeout()
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(connections, (time.monotonic(), 0))  # time and process id of a heartbeat
        self._on_death: Callable[[], None] | None = None
        self._wake, self._woken = socket.socketpair()
        for connection in self._connections.values():
            _watch(connection, self._timeout)
        # Otherwise, child processes would keep the connections open after the death of this process.
        os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(self)))
        self._thread = threading.Thread(target=self._listen, name="kdist lifeline", daemon=True)
        self._thread.start()

    def wait_for_loss(self, timeout: float) -> dict[int, str]:
        """Waits until a worker is lost, and returns its index and the reason; empty if no worker is lost.

        If several workers are lost, returns the first one that died, hung or was suspended, because the
        others may have ended as a consequence. If there is none, returns the first one.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._losses and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            if self._losses and not self._culprits():
                self._changed.wait_for(self._culprits, 0.3)
            return self._first(self._culprits() or self._losses)

    @property
    def lost(self) -> frozenset[int]:
        """The workers that are lost or have ended."""
        with self._changed:
            return frozenset(self._losses)

    def died(self) -> dict[int, str]:
        """Returns a worker that died, hung or was suspended, as `wait_for_loss` does, without waiting."""
        with self._changed:
            return self._first(self._culprits())

    def _first(self, indices: Iterable[int]) -> dict[int, str]:
        return {index: _WORDS[self._losses[index]] for index in itertools.islice(indices, 1)}

    def _culprits(self) -> list[int]:
        return [index for index, kind in self._losses.items() if kind in _LOST]

    def say_hung(self) -> None:
        """Notifies the others that this worker hung and exits, so that their errors contain the reason."""
        self._tell(_HUNG, self._index)

    def on_death(self, call: Callable[[], None]) -> None:
        """Sets a function to call in a separate thread when a worker has died, hung or been suspended."""
        self._on_death = call

    def close(self) -> None:
        """Notifies the others and closes the connections, so that they do not report this worker as dead."""
        if self._closing:
            return
        self._closing = True
        failed = getattr(sys, "last_type", None) is not None
        self._tell(_FAILED if failed else _ENDED, self._index)
        self._wake.send(b"x")
        self._thread.join(2.0)
        self._let_go()

    def _let_go(self) -> None:
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for index, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, index)
            next_beat = 0.0
            while not self._closing:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._timeout * _BEATS
                    self._beat()
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.data is not None and not self._read(key.data):
                        selector.unregister(key.fileobj)

    def _beat(self) -> None:
        """Sends a heartbeat, and records workers without heartbeats."""
        self._tell(_BEAT, os.getpid())
        now = time.monotonic()
        if now - self._looked > self._timeout * _SILENCE / 2:  # this process itself was suspended
            self._heard = {index: (now, pid) for index, (_, pid) in self._heard.items()}
        self._looked = now
        for index, (heard, pid) in self._heard.items():
            silence = (now - heard) / self._timeout
            if silence < _SILENCE or index in self._losses:
                continue
            near = _is_near(self._connections[index])
            if (near and is_stopped(pid)) or (not near and silence > _SILENCE_ELSEWHERE):
                self._note(_FROZEN, index)

    def _read(self, index: int) -> bool:
        """Reads messages from a connection, and returns whether it is still open."""
        try:
            data = self._connections[index].recv(4096)
        except OSError:
            data = b""
        if not data:
            if not self._closing:
                self._note(_DIED, index)
            return False
        buffer = self._received[index] + data  # the chief relays losses; others report only themselves
        while len(buffer) >= _MESSAGE.size:
            magic, kind, about = _MESSAGE.unpack_from(buffer)
            buffer = buffer[_MESSAGE.size :]
            if magic == _MAGIC and kind == _BEAT:
                self._heard[index] = (time.monotonic(), about)
            elif magic == _MAGIC and kind in _WORDS and (self._index > 0 or about == index):
                self._note(kind, about)
        self._received[index] = buffer
        return True

    def _note(self, kind: bytes, index: int) -> None:
        with self._changed:
            if index in self._losses:
                return  # the connection was closed after a notification
            self._losses[index] = kind
            self._changed.notify_all()
        if self._index == 0:
            self._tell(kind, index, besides=index)
        if kind in _LOST and self._on_death is not None:
            threading.Thread(target=self._on_death, name="kdist lifeline, abort", daemon=True).start()

    def _tell(self, kind: bytes, about: int, besides: int | None = None) -> None:
        for index, connection in self._connections.items():
            if index != besides:
                with contextlib.suppress(OSError):
                    connection.sendall(_MESSAGE.pack(_MAGIC, kind, about))


def _let_go(lifeline: weakref.ref[Lifeline]) -> None:
    known = lifeline()
    if known is not None:
        known._let_go()


def wait_for_workers(
    server: socket.socket, num_workers: int, deadline: float, secret: str
) -> dict[int, socket.socket]:
    """Waits, on the chief, for a connection from every other worker.

    Raises:
        TimeoutError: If a worker does not connect before the deadline.
    """
    connections: dict[int, socket.socket] = {}
    with contextlib.closing(handshake.clients(server, secret, _PURPOSE, deadline)) as clients:
        while len(connections) < num_workers - 1:
            client = next(clients, ())
            if client == ():
                raise TimeoutError("some workers did not connect in time")
            if client:
                link, said = client
                index = said.get("worker")
                if type(index) is int and 0 < index < num_workers and index not in connections:
                    connections[index] = link.connection
                else:
                    link.connection.close()
    return connections


def connect_to_chief(
    host: str, port: int, worker_index: int, deadline: float, secret: str
) -> dict[int, socket.socket]:
    """Connects a worker to the chief, which calls `wait_for_workers`."""
    left = max(0.1, deadline - time.monotonic())
    link = handshake.connect((host, port), secret, _PURPOSE, left, left)
    link.send({"worker": worker_index})
    return {0: link.connection}


def _is_near(connection: socket.socket) -> bool:
    """Returns whether the other end is on this machine."""
    with contextlib.suppress(OSError):
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    return False


def _watch(connection: socket.socket, timeout: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel detects a vanished host after the idle time and three probes.
    pause = max(1, int(timeout / 7))
    keep_alive = {
        "TCP_KEEPIDLE": 2 * pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(timeout * 750),
    }
    for name, value in keep_alive.items():
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
