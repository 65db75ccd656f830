"""Connections on which both sides prove that they know the secret of the job, without sending it.

The client sends a nonce; the server answers with its own nonce. From then on, each message carries a proof that covers
both nonces, the role of the sender, and the message. Messages are JSON of limited size; nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import time
from collections.abc import Generator, Mapping
from typing import Any

from kdist.cluster import logs
from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.environment import TOKEN_VARIABLE, cluster_token
from kdist.cluster.secret import (
    EXPORT_TOKEN,
    NONCE_BYTES,
    PROOF_BYTES,
    is_proof,
    job_secret,
    new_nonce,
    prove,
)
from kdist.errors import ClusterConfigError

_HEADER = struct.Struct("!4sI")
_MAGIC = b"kdh1"
_MOST_BYTES = 4096  # of a message from a client
_MOST_PENDING = 512  # connections that have not proved anything yet
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class NotOfThisJobError(ConnectionError):
    """The other side of a connection does not prove that it knows the secret of the job."""


def secret_if_any(address: str, *, warn: bool = False) -> str:
    """Returns the secret for a job that meets at an address; empty if there is none and other machines take part.

    Args:
        address: The address, as `host:port`.
        warn: Whether to log a warning if there is no secret.
    """
    if cluster_token() or is_loopback(split_address(address)[0]):
        return job_secret([address])
    if warn:
        logs.logger.warning(
            "%s is not set, so the workers cannot check who connects to %s. Keep its ports in a private network, or "
            "set the same secret on all machines: %s",
            TOKEN_VARIABLE,
            address,
            EXPORT_TOKEN,
        )
    return ""


def secret_error(address: str, error: NotOfThisJobError) -> ClusterConfigError:
    """Returns the error of a process that has reached another one, but not of its job."""
    return ClusterConfigError(
        "All processes of a job must know the same secret, but the one that answers at this address has another "
        "one, or is not of this job.",
        received={"address": address, "error": str(error)},
        hint=f"Set the same secret for all of them, or choose another port:\n{EXPORT_TOKEN}",
    )


class Link:
    """One side of a connection. `connect` and `clients` create links.

    Args:
        connection: The connection, which the link does not close by itself.
        secret: The secret of the job. With an empty one, the proofs prove nothing.
        purpose: The kind of the connection, the same on both sides.
        roles: The own role, and that of the other side.
    """

    def __init__(self, connection: socket.socket, secret: str, purpose: str, *roles: str) -> None:
        self.connection = connection
        self.host = str(connection.getpeername()[0])
        self.nonces = {roles[0]: new_nonce()}
        self._secret, self._purpose, self._roles = secret, purpose, roles
        self._received = b""
        self._wanted = _HEADER.size

    def send(self, message: Mapping[str, Any], first: bytes = b"") -> None:
        """Sends a message with its proof; `first` goes before both."""
        text = json.dumps(message).encode()
        proof = prove(self._secret, self._purpose, self._roles[0], self._both_nonces(), text)
        self.send_bytes(first + proof + text)

    def send_bytes(self, body: bytes) -> None:
        """Sends bytes without a proof."""
        self.connection.settimeout(5.0)
        self.connection.sendall(_HEADER.pack(_MAGIC, len(body)) + body)

    def receive(self, deadline: float, most: int = _MOST_BYTES) -> dict[str, Any]:
        """Waits for a message, and checks its proof.

        Raises:
            NotOfThisJobError: If the proof is wrong.
            OSError: If the connection is lost, the message is late, or these bytes are no message.
        """
        return self.check(self.receive_bytes(deadline, most))

    def receive_bytes(self, deadline: float, most: int = _MOST_BYTES) -> bytes:
        """Waits for bytes without a proof."""
        while (body := self.read(max(0.01, deadline - time.monotonic()), most)) is None:
            pass
        return body

    def read(self, timeout: float, most: int = _MOST_BYTES) -> bytes | None:
        """Reads once. Never reads beyond the message: the bytes after it may have another format."""
        self.connection.settimeout(timeout)
        received = self.connection.recv(min(self._wanted - len(self._received), 1 << 20))
        if not received:
            raise ConnectionResetError("the other side has closed the connection")
        self._received += received
        if len(self._received) == _HEADER.size == self._wanted:
            magic, size = _HEADER.unpack(self._received)
            if magic != _MAGIC or not NONCE_BYTES <= size <= most:
                raise ConnectionAbortedError("the other side sends something else")
            self._wanted += size
        if len(self._received) < self._wanted:
            return None
        body, self._received, self._wanted = self._received[_HEADER.size :], b"", _HEADER.size
        return body

    def check(self, body: bytes) -> dict[str, Any]:
        """Returns the message in `body` if its proof is right."""
        proof, text = body[:PROOF_BYTES], body[PROOF_BYTES:]
        if not is_proof(proof, self._secret, self._purpose, self._roles[1], self._both_nonces(), text):
            raise NotOfThisJobError(f"the other side has another secret, or none ({TOKEN_VARIABLE})")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("the other side sends something else")
        return message

    def _both_nonces(self) -> list[bytes]:
        return [nonce for _, nonce in sorted(self.nonces.items())]


def connect(place: tuple[str, int], secret: str, purpose: str, timeout: float, answer: float) -> Link:
    """Connects to a server of the same job within `timeout` seconds, and waits for its answer for `answer` seconds.

    Raises:
        NotOfThisJobError: If the server does not prove that it knows the secret.
        OSError: If there is no server, or its answer is late.
    """
    link = Link(socket.create_connection(place, timeout), secret, purpose, "client", "server")
    try:
        link.send_bytes(link.nonces["client"])
        body = link.receive_bytes(time.monotonic() + answer)
        link.nonces["server"] = body[:NONCE_BYTES]
        link.check(body[NONCE_BYTES:])
    except BaseException:
        link.connection.close()
        raise
    return link


def clients(
    server: socket.socket, secret: str, purpose: str, deadline: float
) -> Generator[tuple[Link, dict[str, Any]] | None]:
    """Yields the first message of each client that proves to know the secret, with its link, until the deadline.

    Yields `None` at least once a second. Logs and closes other connections; the caller closes the links that it got.
    """
    pending: dict[Link, None] = {}
    reported = False
    server.settimeout(0.0)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(1.0, left)):
                    link = key.data
                    if link is None:
                        if link := _accept(server, secret, purpose, pending, selector):
                            selector.register(link.connection, selectors.EVENT_READ, link)
                        continue
                    if link not in pending:  # closed a moment ago, to make room
                        continue
                    try:
                        message = _advance(link)
                    except OSError as error:
                        _drop(link, pending, selector)
                        begun = "client" in link.nonces
                        if begun and isinstance(error, ConnectionResetError):
                            error = NotOfThisJobError(f"it does not accept the secret ({TOKEN_VARIABLE})")
                        # A probe that only looks whether the port is open sends nothing.
                        if not reported and (begun or not isinstance(error, ConnectionResetError)):
                            reported = True
                            logs.logger.warning("Dropped a connection from %s: %s.", link.host, error)
                        continue
                    if message is not None:
                        del pending[link]
                        selector.unregister(link.connection)
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
        raise ConnectionAbortedError("the other side sends something else")
    link.nonces["client"] = body
    link.send({}, first=link.nonces["server"])
    return None


def _accept(
    server: socket.socket,
    secret: str,
    purpose: str,
    pending: dict[Link, None],
    selector: selectors.BaseSelector,
) -> Link | None:
    """Accepts a connection. Closes the oldest that has proved nothing if there are too many, or too many files."""
    connection = None
    try:
        connection, _ = server.accept()
        link = Link(connection, secret, purpose, "server", "client")
    except OSError as error:
        if connection is not None:
            connection.close()
        if error.errno not in _NO_MORE_FILES:
            return None  # the client has gone
        if not pending:
            time.sleep(0.1)  # until this process has closed some
    if pending and (connection is None or len(pending) >= _MOST_PENDING):
        _drop(next(iter(pending)), pending, selector)
    if connection is None:
        return None
    pending[link] = None
    return link


def _drop(link: Link, pending: dict[Link, None], selector: selectors.BaseSelector) -> None:
    del pending[link]
    selector.unregister(link.connection)
    link.connection.close()
