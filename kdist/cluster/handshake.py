"""Connections on which both sides prove that they know the secret of the job, without sending it.

The client sends a nonce; the server answers with its own nonce. From then on, each message carries a proof that covers
both nonces, the role of the sender, and the message. Messages are JSON of limited size; nothing is unpickled.
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
_MOST_BYTES = 4096  # of a message from a client
_MOST_PENDING = 512  # connections that have not proved anything yet
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class NotOfThisJobError(ConnectionError):
    """The other side of a connection does not prove that it knows the secret of the job."""


def secret_if_any(address: str, *, warn: bool = False) -> str:
    """Returns the secret of a job that meets at `address`; "" if there is none, and other machines take part."""
    if cluster_token() or is_loopback(split_address(address)[0]):
        return job_secret([address])
    if warn:
        logs.logger.warning(
            f"{TOKEN_VARIABLE} is not set, so the workers cannot verify the processes that connect to {address}. Use a "
            f"private network, or create a secret once and set it on all machines: {EXPORT_TOKEN}"
        )
    return ""


def secret_error(address: str, error: NotOfThisJobError) -> ClusterConfigError:
    """Returns the error of a process that has reached another one, but not of its job."""
    return ClusterConfigError(
        "The process at this address uses a different secret, or belongs to another job.",
        received={"address": address, "error": str(error)},
        hint=f"Choose another port, or set the same secret for all processes of the job:\n{EXPORT_TOKEN}",
    )


class Link:
    """One side of a connection. `connect` and `clients` create links; their callers close the connections.

    Args:
        connection: The connection.
        secret: The secret of the job. With an empty one, the proofs prove nothing.
        purpose: The kind of the connection, the same on both sides.
        roles: The own role, and that of the other side.
    """

    def __init__(self, connection: socket.socket, secret: str, purpose: str, *roles: str) -> None:
        self.connection = connection
        self.host = str(connection.getpeername()[0])
        self.nonces = {roles[0]: secrets.token_bytes(NONCE_BYTES)}
        self._secret, self._purpose, self._roles = secret, purpose, roles
        self._received, self._wanted = b"", _HEADER.size

    def send(self, message: Mapping[str, Any], first: bytes = b"") -> None:
        """Sends a message with its proof; `first` goes before both."""
        text = json.dumps(message).encode()
        self.send_bytes(first + self._prove(self._roles[0], text) + text)

    def send_bytes(self, body: bytes) -> None:
        """Sends bytes without a proof."""
        self.connection.settimeout(5.0)
        self.connection.sendall(_HEADER.pack(_MAGIC, len(body)) + body)

    def receive(self, deadline: float, most: int = _MOST_BYTES, after: int = 0) -> dict[str, Any]:
        """Waits for a message; the nonce of the other side may come `after` so many bytes of it."""
        while (left := deadline - time.monotonic()) > 0:
            if (body := self.read(left, most)) is not None:
                if after:
                    self.nonces[self._roles[1]] = body[:after]
                return self.check(body[after:])
        raise TimeoutError("the other side did not respond in time")

    def read(self, timeout: float, most: int = _MOST_BYTES) -> bytes | None:
        """Reads once. Never reads beyond the message: the bytes after it may have another format."""
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
        """Returns the message in `body` if its proof is right."""
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
    """Connects to a server of the same job within `timeout` seconds, and waits for its answer for `answer` seconds.

    Raises:
        NotOfThisJobError: If the server does not prove that it knows the secret.
        OSError: If there is no server, or its answer is late.
    """
    link = Link(socket.create_connection(place, timeout), secret, purpose, "client", "server")
    try:
        link.send_bytes(link.nonces["client"])
        link.receive(time.monotonic() + answer, after=NONCE_BYTES)
    except BaseException:
        link.connection.close()
        raise
    return link


def clients(
    server: socket.socket, secret: str, purpose: str, deadline: float
) -> Generator[tuple[Link, dict[str, Any]] | None]:
    """Yields the first message of each client that proves to know the secret, with its link, until the deadline.

    Yields `None` at least once a second. Closes other connections, and logs the first of them.
    """
    pending: dict[Link, None] = {}  # in the order in which they came
    reported = False
    server.settimeout(0.0)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def accept() -> None:
            try:
                link = Link(server.accept()[0], secret, purpose, "server", "client")
            except OSError as error:  # the client may have gone
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
                    if link not in pending:  # dropped a moment ago, to make room
                        continue
                    try:
                        message = _advance(link)
                    except OSError as error:
                        drop(link)
                        begun, closed = "client" in link.nonces, isinstance(error, ConnectionResetError)
                        # A probe that only looks whether the port is open sends nothing.
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
    """Reads what a client has sent, and answers its first message; returns the second one."""
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
