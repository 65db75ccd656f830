"""Connections on which both sides prove that they know the secret of the job, without sending it.

The client sends a nonce, and the server responds with its own nonce. From then on, each message has a proof,
which covers both nonces, the sender's role and the message. Messages are JSON of limited size, never pickles.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Mapping
from typing import Any

from kdist.cluster import logs
from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.environment import TOKEN_VARIABLE, cluster_token
from kdist.cluster.secret import EXPORT_TOKEN, PROOF_BYTES, job_secret, prove
from kdist.errors import ClusterConfigError

_HEADER = struct.Struct("!4sI")
_MAGIC = b"kdh1"
NONCE_BYTES = 16
_MOST_BYTES = 4096  # limit for a message from a client
_MOST_PENDING = 512  # connections without a proof so far
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class NotOfThisJobError(ConnectionError):
    """The other side of a connection did not prove that it knows the secret of the job."""


def secret_if_any(address: str, *, warn: bool = False) -> str:
    """Returns the secret of a job, or "" if it is not set and `address` is not a loopback address."""
    if cluster_token() or is_loopback(split_address(address)[0]):
        return job_secret([address])
    if warn:
        logs.logger.warning(
            f"{TOKEN_VARIABLE} is not set, so the workers cannot verify the processes that connect to {address}. Use a "
            f"private network, or create a secret once and set it on all machines: {EXPORT_TOKEN}"
        )
    return ""


def secret_error(address: str, error: NotOfThisJobError) -> ClusterConfigError:
    """Returns the error of a process that connected to a process of another job."""
    return ClusterConfigError(
        "The process at this address uses a different secret, or belongs to another job.",
        received={"address": address, "error": str(error)},
        hint=f"Choose another port, or set the same secret for all processes of the job:\n{EXPORT_TOKEN}",
    )


class SilentServerError(TimeoutError):
    """The other side accepted the connection, but did not respond."""


class Link:
    """One side of a connection. `connect` and `clients` create links; their callers close the connections.

    If the secret is empty, the connection is not authenticated. `purpose` is the kind of the connection, which
    must be the same on both sides. `roles` are the role of this side and the role of the other side.
    """

    def __init__(self, connection: socket.socket, secret: str, purpose: str, *roles: str) -> None:
        self.connection = connection
        self.host = str(connection.getpeername()[0])
        self.nonces = {roles[0]: secrets.token_bytes(NONCE_BYTES)}
        self._secret, self._purpose, self._roles = secret, purpose, roles
        self._received, self._wanted = b"", _HEADER.size

    def send(self, message: Mapping[str, Any], first: bytes = b"") -> None:
        """Sends a message with its proof, preceded by `first`."""
        text = json.dumps(message).encode()
        self.send_bytes(first + self._prove(self._roles[0], text) + text)

    def send_bytes(self, body: bytes) -> None:
        self.connection.settimeout(5.0)
        self.connection.sendall(_HEADER.pack(_MAGIC, len(body)) + body)

    def receive(self, deadline: float, most: int = _MOST_BYTES, after: int = 0) -> dict[str, Any]:
        """Waits for a message. Its first `after` bytes are the nonce of the other side."""
        while (left := deadline - time.monotonic()) > 0:
            if (body := self.read(left, most)) is not None:
                if after:
                    self.nonces[self._roles[1]] = body[:after]
                return self.check(body[after:])
        raise TimeoutError("the other side did not respond in time")

    def read(self, timeout: float, most: int = _MOST_BYTES) -> bytes | None:
        """Reads once, and returns the message if it is complete. Never reads bytes after the message."""
        self.connection.settimeout(timeout)
        received = self.connection.recv(min(self._wanted - len(self._received), 1 << 20))
        if not received:
            raise ConnectionResetError("the other side closed the connection")
        self._received += received
        if len(self._received) == _HEADER.size == self._wanted:
            magic, size = _HEADER.unpack(self._received)
            if magic != _MAGIC or not NONCE_BYTES <= size <= most:
                raise ConnectionAbortedError("the other side sent unexpected data")
            self._wanted += size
        if len(self._received) < self._wanted:
            return None
        body, self._received, self._wanted = self._received[_HEADER.size :], b"", _HEADER.size
        return body

    def check(self, body: bytes) -> dict[str, Any]:
        proof, text = body[:PROOF_BYTES], body[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._prove(self._roles[1], text)):
            raise NotOfThisJobError(f"the other side uses a different secret, or none ({TOKEN_VARIABLE})")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(text), dict):
                return message
        raise ConnectionAbortedError("the other side sent unexpected data")

    def _prove(self, role: str, text: bytes) -> bytes:
        nonces = [self.nonces[role] for role in sorted(self._roles)]
        return prove(self._secret, self._purpose, role, nonces, text)


def connect(place: tuple[str, int], secret: str, purpose: str, timeout: float, answer: float) -> Link:
    """Connects to a server of this job within `timeout` seconds. Waits `answer` seconds for its response.

    Raises:
        NotOfThisJobError: If the server does not prove that it knows the secret.
        SilentServerError: If the server does not respond.
        OSError: If there is no server, or it does not respond in time.
    """
    link = Link(socket.create_connection(place, timeout), secret, purpose, "client", "server")
    try:
        link.send_bytes(link.nonces["client"])
        link.receive(time.monotonic() + answer, after=NONCE_BYTES)
    except TimeoutError as error:
        link.connection.close()
        raise SilentServerError(str(error)) from None
    except BaseException:
        link.connection.close()
        raise
    return link


def clients(
    server: socket.socket, secret: str, purpose: str, deadline: float
) -> Generator[tuple[Link, dict[str, Any]] | None]:
    """Yields a link and the first message for each client that proves that it knows the secret.

    Also yields `None` at least once per second until the deadline. Closes and logs other connections.
    """
    pending: dict[Link, None] = {}  # in the order of their arrival
    reported = False
    server.settimeout(0.0)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def accept() -> None:
            try:
                link = Link(server.accept()[0], secret, purpose, "server", "client")
            except OSError as error:  # the client may have disconnected
                if error.errno in _NO_MORE_FILES and not pending:
                    time.sleep(0.1)
                elif error.errno in _NO_MORE_FILES:
                    drop(next(iter(pending)))
                return
            pending[link] = None
            selector.register(link.connection, selectors.EVENT_READ, link)
            if len(pending) > _MOST_PENDING:
                drop(next(iter(pending)))

        def drop(link: Link, close: bool = True) -> None:
            del pending[link]
            selector.unregister(link.connection)
            if close:
                link.connection.close()

        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(1.0, left)):
                    link = key.data
                    if link is None:
                        accept()
                        continue
                    if link not in pending:  # just dropped, because there are too many
                        continue
                    try:
                        message = _advance(link)
                    except OSError as error:
                        drop(link)
                        begun, closed = "client" in link.nonces, isinstance(error, ConnectionResetError)
                        # A probe that checks whether the port is open sends nothing.
                        if not reported and (begun or not closed):
                            reported = True
                            why = f"it rejected the secret ({TOKEN_VARIABLE})" if begun and closed else error
                            logs.logger.warning(
                                "Dropped a connection from %s: %s. If it belongs to this job, set the same %s for it.",
                                link.host,
                                why,
                                TOKEN_VARIABLE,
                            )
                        continue
                    if message is not None:
                        drop(link, close=False)
                        yield link, message
                yield None
        finally:
            for link in pending:
                link.connection.close()


def _advance(link: Link) -> dict[str, Any] | None:
    """Reads from a client without waiting. Responds to its first message, and returns the second one."""
    try:
        body = link.read(0.0)
    except BlockingIOError:
        return None
    if body is None:
        return None
    if "client" in link.nonces:
        return link.check(body)
    if len(body) != NONCE_BYTES:
        raise ConnectionAbortedError("the other side sent unexpected data")
    link.nonces["client"] = body
    link.send({}, first=link.nonces["server"])
    return None
