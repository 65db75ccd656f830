"""Unknown connections at the rendezvous ports of workers neither stop the job nor take part in it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kdist.cluster import Cluster, discover, handshake
from kdist.cluster.handshake import Link, NotOfThisJobError, clients, connect
from kdist.control import rendezvous
from kdist.errors import ClusterConfigError
from tests.helpers.joining import addresses_of
from tests.helpers.ports import neighboring_ports


def workers(port: int, host: str = "127.0.0.1", count: int = 2) -> list[Cluster]:
    environ = {"WORLD_SIZE": str(count), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return [discover(environ={**environ, "RANK": str(index)}) for index in range(count)]


@contextlib.contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs a call in a thread; the list holds its result or its error at the end of the block."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        thread.join(30)
        assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def line(**said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"


STRANGERS = {
    "aborts the job": line(worker=1, num_workers=999, address="192.0.2.1:1"),
    "is worker 1": line(worker=1, num_workers=2, address="192.0.2.1:1"),
    "speaks HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "talks on": b"x" * 100_000,
    "promises 4 GB": b"kdh1\xff\xff\xff\xff",
    "proves nothing": (frame := b"kdh1\0\0\0\x10" + bytes(16)) + b"kdh1\0\0\0\x22" + bytes(32) + b"{}",
    "says two hellos": frame + frame,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_workers_meet_in_spite_of_a_stranger(name: str, caplog: pytest.LogCaptureFixture) -> None:
    port = neighboring_ports(3)
    first, second = workers(port)
    with in_thread(lambda: addresses_of(first, 20.0)) as found, connected(port + 1) as stranger:
        # Worker 1 connects after the stranger, so that worker 0 cannot have finished before.
        with contextlib.suppress(ConnectionError):
            stranger.sendall(STRANGERS[name])
            stranger.settimeout(10)
            while stranger.recv(1000):
                pass
        others = addresses_of(second, 20.0)
    assert found == [others]
    assert others[0] == f"127.0.0.1:{port}"
    assert others[1].startswith("127.0.0.1:")
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("Dropped a connection from 127.0.0.1: ")


@pytest.mark.kills("meeting_proofs_not_checked")
def test_a_worker_does_not_believe_a_stranger_that_answers_for_worker_0() -> None:
    port = neighboring_ports(3)
    first, second = workers(port)
    with socket.create_server(("127.0.0.1", port + 1)) as server:
        stolen = clients(server, "another secret", rendezvous._purpose(first), time.monotonic() + 1.0)
        with (
            in_thread(lambda: [*filter(None, stolen)]) as taken,
            in_thread(lambda: addresses_of(first)) as found,
        ):
            others = addresses_of(second)
    assert found == [others]
    assert taken == [[]]


@pytest.mark.kills("meeting_proofs_not_checked")
def test_another_secret_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    secrets = {True: "one", False: "another"}  # only worker 0 warns
    monkeypatch.setattr(handshake, "secret_if_any", lambda address, warn=False: secrets[warn])
    first, second = workers(neighboring_ports(3))
    with in_thread(lambda: addresses_of(first, 1.5)) as found:
        with pytest.raises(ClusterConfigError, match=r"(?s)same secret.*export KDIST_CLUSTER_TOKEN="):
            addresses_of(second, 1.5)
    assert "did not join within 1.5 s: worker 1." in str(found[0])
    dropped = [text for text in caplog.messages if text.startswith("Dropped")]
    assert len(dropped) == 1
    assert "KDIST_CLUSTER_TOKEN" in dropped[0]


@pytest.mark.kills("meeting_without_a_secret_stops_for_anybody")
def test_without_a_secret_workers_of_several_machines_meet_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KDIST_CLUSTER_TOKEN", raising=False)
    port = neighboring_ports(3)
    first, second = workers(port, "0.0.0.0")  # not a loopback address, but this machine
    third = dataclasses.replace(second, num_workers=3, addresses=(*second.addresses, None))
    with in_thread(lambda: addresses_of(first, 20.0)) as found:
        with pytest.raises(ClusterConfigError, match="different number of workers"):
            addresses_of(third, 20.0)
        assert not found, "the job goes on"
        others = addresses_of(second, 20.0)
    assert found == [others]
    open_to_all, ignored = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "export KDIST_CLUSTER_TOKEN=$(openssl rand -hex 16)" in open_to_all
    assert ignored.startswith("Ignored a worker from 127.0.0.1: A worker was started with a different number")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def first_of(server: socket.socket, secret: str = "secret", seconds: float = 10.0) -> Any:
    with contextlib.closing(clients(server, secret, "test", time.monotonic() + seconds)) as found:
        return next(filter(None, found), None)


def test_messages_in_both_directions(server: socket.socket) -> None:
    place = server.getsockname()
    with in_thread(lambda: first_of(server)) as found:
        link = connect(place, "secret", "test", 5.0, 5.0)
        with link.connection:
            link.send({"text": "ä" * 600})
            link.connection.sendall(b"and more")  # in another format
            while not found:
                time.sleep(0.01)
            other, message = found[0]
            with other.connection:
                assert message == {"text": "ä" * 600}
                other.connection.settimeout(5)
                assert other.connection.recv(100) == b"and more"
                other.send({"text": "x" * 100_000})
                with pytest.raises(ConnectionAbortedError):
                    link.receive(time.monotonic() + 5)
            assert other.host == "127.0.0.1"


def answer(link: Link) -> bytes:
    while (body := link.read(5.0)) is None:
        pass
    return body


@pytest.mark.kills("meeting_proofs_work_again")
def test_what_was_recorded_does_not_work_again(server: socket.socket) -> None:
    recorded: list[bytes] = []
    place = server.getsockname()
    with in_thread(lambda: first_of(server)) as found:
        link = connect(place, "secret", "test", 5.0, 5.0)
        with link.connection:
            send = link.send_bytes
            link.send_bytes = lambda body: (recorded.append(body), send(body))  # type: ignore[method-assign]
            link.send({"worker": 1})
    found[0][0].connection.close()
    with (
        in_thread(lambda: first_of(server, seconds=0.5)) as again,
        socket.create_connection(place) as stranger,
    ):
        other = Link(stranger, "", "test", "client", "server")
        other.send_bytes(link.nonces["client"])  # as on the first connection
        assert len(answer(other)) > 32
        other.send_bytes(recorded[0])
        with pytest.raises(ConnectionResetError):
            answer(other)
    assert again == [None]


def test_an_answer_that_drips_is_late(server: socket.socket) -> None:
    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            for byte in b"kdh1\0\0\1\0" + bytes(256):
                connection.sendall(bytes([byte]))
                time.sleep(0.05)

    start = time.monotonic()
    with in_thread(drip):
        with pytest.raises(TimeoutError):
            connect(server.getsockname(), "secret", "test", 5.0, 0.5)
        assert time.monotonic() - start < 3


def test_an_answer_sent_back_proves_nothing(server: socket.socket) -> None:
    """A stranger without the secret echoes the client's own messages."""

    def mirror() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(1000))
            time.sleep(0.2)

    with in_thread(mirror), pytest.raises((NotOfThisJobError, ConnectionError)):
        connect(server.getsockname(), "secret", "test", 5.0, 1.0)


class Full(socket.socket):
    """A listener that refuses some connections, as in a process with too many open files."""

    refusals = 0

    def accept(self) -> Any:
        if Full.refusals:
            Full.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.mark.kills("meeting_ends_when_too_many_files_are_open")
def test_too_many_open_files_end_strangers_and_not_the_job(server: socket.socket) -> None:
    place = server.getsockname()
    full = Full(fileno=server.detach())
    with full, in_thread(lambda: first_of(full)) as found, socket.create_connection(place) as stranger:
        time.sleep(0.1)  # the stranger has been accepted
        Full.refusals = 3
        link = connect(place, "secret", "test", 5.0, 5.0)
        with link.connection:
            link.send({"worker": 1})
            stranger.settimeout(5)
            assert stranger.recv(1) == b"", "the connection that proved nothing was closed"
    assert found[0][1] == {"worker": 1}
    found[0][0].connection.close()


def test_strangers_do_not_keep_the_server_beyond_its_deadline(server: socket.socket) -> None:
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(server.getsockname(), timeout=1).close()

    start = time.monotonic()
    with in_thread(knock):
        try:
            assert not any(clients(server, "secret", "test", start + 0.5))
        finally:
            stop.set()
    assert time.monotonic() - start < 5


def test_many_silent_connections(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MOST_PENDING", 8)
    place = server.getsockname()
    with in_thread(lambda: first_of(server)) as found, contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection(place))
        link = connect(place, "secret", "test", 5.0, 5.0)
        with link.connection:
            link.send({"worker": 1})
    assert found[0][1] == {"worker": 1}
    found[0][0].connection.close()
