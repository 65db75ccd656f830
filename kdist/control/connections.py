"""`Connections`: the sockets between workers, which send and receive frames in a thread and never block.

The kernel closes the sockets of a process that dies, and its keep-alive probes detect a host that vanishes. A
stopped process (SIGSTOP) keeps its sockets, but sends no heartbeats.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from kdist.cluster import logs, timeouts
from kdist.control.activity import is_stopped

_HEADER = struct.Struct("!4scIQ")
_MAGIC = b"kdc1"
_MOST_BYTES = 1 << 36  # in a frame
_CHUNK = 1 << 18
# The fields `tcpi_unacked`, `tcpi_last_ack_recv`, `tcpi_notsent_bytes` and `tcpi_snd_wnd` of TCP_INFO.
_TCP_INFO = struct.Struct("@24xI28xI84xI80xI")
# Shares of the heartbeat timeout: between two heartbeats; without heartbeats on the same and on another machine; and
# without an acknowledgment of another machine. A C call that holds the GIL also stops heartbeats, but not the kernel,
# which sends acknowledgments. On the same machine, the kernel shows whether a process is stopped.
_BEATS, _SILENCE, _SILENCE_ELSEWHERE, _UNREACHABLE = 0.05, 0.15, 4.0, 0.75
_BEAT = b"b"
# Seconds to wait for the other side when the connections end.
_FAREWELL = 1.0

Frame = tuple[bytes, int, bytes]
"""The kind of a frame, the worker or the number that it is about, and its data."""


def frame(kind: bytes, about: int, data: bytes = b"") -> bytes:
    return _HEADER.pack(_MAGIC, kind, about, len(data)) + data


class Connection:
    """One end of a connection.

    Args:
        connected: The connected socket. Both sides have proved that they belong to the job.
        timeout: Seconds after which the kernel reports a host that does not respond.
    """

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self.socket = connected
        self.heard = time.monotonic()
        """The time of the last data. A heartbeat can be behind a long message."""
        self.pid = 0
        """The process ID of the other side."""
        self.is_open = True
        self.is_near = False
        """Whether the other side is on this machine."""
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        connected.setblocking(False)
        # The kernel detects a vanished host after the idle time and three probes, if no data is on its way.
        pause = max(1, int(timeout / 7))
        options = {
            "TCP_NODELAY": 1,
            "TCP_KEEPIDLE": 2 * pause,
            "TCP_KEEPINTVL": pause,
            "TCP_KEEPCNT": 3,
            # Not shorter: this also ends connections to a worker that does not read, because a C call holds the GIL.
            "TCP_USER_TIMEOUT": int(timeout * 1000 * _SILENCE_ELSEWHERE),
        }
        with contextlib.suppress(OSError):  # the other side can be gone already; `read` reports it
            self.is_near = connected.getpeername()[0] == connected.getsockname()[0]
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, data: bytes) -> bool:
        """Sends the bytes of frames, now or later. Returns whether all bytes are sent."""
        if not self.is_open:
            return True
        self._unsent.append(memoryview(data))
        return self.flush()

    def flush(self) -> bool:
        """Sends the bytes that the kernel accepts now. Returns whether all bytes are sent."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:  # `read` reports the end of the connection
                self._unsent.clear()
                break
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()
        return True

    def read(self) -> list[Frame] | None:
        """Returns the frames that have arrived, or `None` after the end of the connection."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        self._received += data
        found, start = [], 0
        while len(self._received) - start >= _HEADER.size:
            magic, kind, about, size = _HEADER.unpack_from(self._received, start)
            if magic != _MAGIC or size > _MOST_BYTES:
                return None
            end = start + _HEADER.size + size
            if end > len(self._received):
                break
            found.append((kind, about, bytes(self._received[start + _HEADER.size : end])))
            start = end
        del self._received[:start]
        return found

    @property
    def num_unsent(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        return sum(map(len, self._unsent))

    def is_unreachable(self, seconds: float) -> bool:
        """Returns whether the kernel of the other side has acknowledged nothing for so long.

        Works only on Linux, like the fields of https://man7.org/linux/man-pages/man7/tcp.7.html (TCP_INFO).
        """
        if sys.platform != "linux":
            return False
        with contextlib.suppress(OSError):
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            fields = info.ljust(_TCP_INFO.size, b"\0")  # old kernels have fewer
            unacknowledged, milliseconds, unsent, window = _TCP_INFO.unpack(fields)
            # Without a route, the kernel sends nothing. A worker that does not read has no window.
            is_waiting = unacknowledged or (unsent and window)
            return bool(is_waiting and milliseconds > 1000 * seconds)
        return False

    def end(self) -> None:
        """Closes this direction of the connection, after all sent bytes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.is_open = False
        self._unsent.clear()
        self.socket.close()


class Handler(Protocol):
    """Receives the frames and the losses. `Connections` holds its lock during these calls."""

    def handle(self, index: int, kind: bytes, about: int, data: bytes) -> None:
        """Handles a frame of another worker."""

    def note_end(self, index: int) -> None:
        """Notes that the connection to a worker has ended."""

    def note_silence(self, index: int) -> None:
        """Notes that a worker is stopped."""

    def finish_round(self) -> None:
        """Called after all frames that had arrived were handled."""


class Connections:
    """The connections of one worker, by the index of the other worker, and the thread that reads from them."""

    def __init__(self, sockets: Mapping[int, socket.socket], handler: Handler) -> None:
        self.changed = threading.Condition()
        """The lock of all state, which is notified of each change."""
        self._handler = handler
        self._timeout = timeouts.heartbeat_timeout()
        self._all = {index: Connection(link, self._timeout) for index, link in sockets.items()}
        self._blocked: set[int] = set()  # they have unsent bytes
        self._looked = time.monotonic()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        # Otherwise, child processes would keep the connections open after the death of this process.
        os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(self)))
        self._thread = threading.Thread(target=self._run, name="kdist channel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, index: int, kind: bytes, about: int, data: bytes = b"") -> None:
        """Sends a frame to a worker. Does not wait."""
        self._write(index, frame(kind, about, data))

    def broadcast(self, kind: bytes, about: int, data: bytes = b"") -> None:
        """Sends a frame to all connected workers."""
        packed = frame(kind, about, data)
        for index in self._all:
            self._write(index, packed)

    def _write(self, index: int, packed: bytes) -> None:
        with self.changed:
            if not self._all[index].send(packed):
                self._blocked.add(index)
                self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # if the buffer is full, the thread wakes anyway
            self._wake.send(b"x")

    def close(self) -> None:
        """Sends the remaining bytes, however long the others take to read them, and closes the connections."""
        with self.changed:
            if self._closed:
                return
            self._drain()
            # With a full close, the kernel would discard the last bytes if heartbeats have not been read.
            for connection in self._all.values():
                connection.end()
            self.changed.wait_for(self._have_all_ended, _FAREWELL)
            self._closed = True
            self._rouse()
        self._thread.join(2.0)
        self._let_go()

    def _drain(self) -> None:
        """Waits until all bytes are sent. Gives up if no worker reads for the heartbeat timeout."""
        unsent, since = -1, time.monotonic()
        while (left := sum(c.num_unsent for c in self._all.values())) and self._thread.is_alive():
            if left != unsent:
                unsent, since = left, time.monotonic()
            if time.monotonic() - since > self._timeout:
                return
            self.changed.wait(0.1)

    def _have_all_ended(self) -> bool:
        return not any(connection.is_open for connection in self._all.values())

    def _let_go(self) -> None:
        for connection in self._all.values():
            connection.close()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        try:
            self._listen()
        except Exception:  # without this thread, the others would wait forever
            logs.logger.exception("The connection to the other workers failed.")
            with self.changed:
                for index, connection in self._all.items():
                    connection.close()
                    self._handler.note_end(index)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for index, connection in self._all.items():
                selector.register(connection.socket, selectors.EVENT_READ, index)
            next_beat = 0.0
            while not self._closed:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._timeout * _BEATS
                    self._beat()
                for key, events in selector.select(max(0.0, next_beat - time.monotonic())):
                    with self.changed:
                        self._advance(selector, key.data, events)
                with self.changed:
                    self._handler.finish_round()

    def _advance(self, selector: selectors.BaseSelector, index: int | None, events: int) -> None:
        if index is None:
            self._woken.recv(4096)
            self._flush(selector, list(self._blocked))
            return
        if events & selectors.EVENT_WRITE:
            self._flush(selector, [index])
        if events & selectors.EVENT_READ and not self._read(index):
            selector.unregister(self._all[index].socket)
            self._all[index].close()
            self._blocked.discard(index)
            self._handler.note_end(index)
            self.changed.notify_all()

    def _flush(self, selector: selectors.BaseSelector, indices: Sequence[int]) -> None:
        for index in indices:
            connection = self._all[index]
            is_blocked = connection.is_open and not connection.flush()
            if not is_blocked:
                self._blocked.discard(index)
            if connection.is_open:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_blocked else 0)
                selector.modify(connection.socket, events, index)
        self.changed.notify_all()

    def _read(self, index: int) -> bool:
        """Handles the frames that have arrived from a worker, and returns whether its connection is open."""
        frames = self._all[index].read()
        for kind, about, data in frames or ():
            if kind == _BEAT:
                self._all[index].pid = about
                continue
            try:
                self._handler.handle(index, kind, about, data)
            except Exception:  # the data is not from kdist
                return False
        return frames is not None

    def _beat(self) -> None:
        """Sends a heartbeat, and notes workers without heartbeats as stopped."""
        self.broadcast(_BEAT, os.getpid())
        now = time.monotonic()
        if now - self._looked > self._timeout * _SILENCE:  # this process itself was stopped
            for connection in self._all.values():
                connection.heard = now
        self._looked = now
        for index, connection in self._all.items():
            silence = (now - connection.heard) / self._timeout
            if silence < _SILENCE or not connection.is_open:
                continue
            near = connection.is_near
            is_silent = is_stopped(connection.pid) if near else silence > _SILENCE_ELSEWHERE
            with self.changed:
                if is_silent:
                    self._handler.note_silence(index)
                elif connection.is_unreachable(self._timeout * _UNREACHABLE):
                    self._handler.note_end(index)
                else:
                    continue
                # The thread then reads the end of the connection.
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)


def _let_go(connections: weakref.ref[Connections]) -> None:
    known = connections()
    if known is not None:
        known._let_go()
