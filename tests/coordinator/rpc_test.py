"""Calls between tasks: data arrives unchanged, unauthorized callers are rejected, lost tasks are noticed."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from kdist.coordinator import rpc, tls
from kdist.coordinator.rpc import CallFailed, Peer, Service
from kdist.errors import ClusterConfigError, InvalidArgumentError
from tests.helpers.compare import assert_equal
from tests.helpers.scripts import local_addresses


def echo(header: Any, arrays: Any) -> Any:
    return {"heard": header.get("said")}, arrays


def fail(header: Any, arrays: Any) -> Any:
    raise KeyError("a mistake of its own")


def stay(header: Any, arrays: Any) -> Any:
    time.sleep(5)
    return {}, ()


SECRET = "a secret"


def handler_of(header):
    return {"echo": echo, "fail": fail, "stay": stay}[header["method"]]


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Service, str]]:
    (address,) = local_addresses(1)
    made = Service(address, handler_of, SECRET)
    yield made, address
    made.stop()


@pytest.fixture(scope="module")
def peer(service: tuple[Service, str]) -> Iterator[Peer]:
    made = Peer("ps 0 (here)", service[1], SECRET)
    yield made
    made.close()


_DTYPES = st.sampled_from(["float32", "float64", "float16", "int8", "int64", "uint32", "bool"])


@given(
    sent=st.lists(
        _DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0)))
    )
)
def test_arrays_arrive_as_they_were_sent(sent: list[np.ndarray]) -> None:
    header, found = rpc._read(rpc._written({"said": "ä\n"}, sent))
    assert header == {"said": "ä\n"}
    for mine, theirs in zip(sent, found, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("size", [0, 3, rpc._CHUNK - 1, rpc._CHUNK, rpc._CHUNK + 1, 3 * rpc._CHUNK + 5])
def test_sizes_around_those_of_messages(peer: Peer, size: int) -> None:
    draw = np.random.default_rng(size)
    sent = [draw.integers(0, 255, size, "uint8"), np.float32(7), draw.random((3, 4))[:, ::2]]
    header, found = peer.call("echo", {"said": 1}, [np.asarray(one) for one in sent])
    assert header == {"heard": 1}
    assert_equal(sent, found)


def test_the_dtypes_of_accelerators(peer: Peer) -> None:
    sent = np.arange(4).astype(ml_dtypes.bfloat16)
    _, (found,) = peer.call("echo", {}, [sent])
    assert found.dtype == sent.dtype
    np.testing.assert_array_equal(found, sent)


def test_calls_at_once_are_answered_each_by_its_own(peer: Peer) -> None:
    waits = [peer.begin("echo", {"said": number}) for number in range(100)]
    assert [wait()[0]["heard"] for wait in waits] == list(range(100))


@pytest.mark.parametrize("method", ["fail", "there is no such"])
def test_what_a_handler_raises_is_raised_here(peer: Peer, method: str) -> None:
    with pytest.raises(CallFailed, match=r"ps 0 \(here\): KeyError"):
        peer.call(method)
    assert peer.call("echo")


@pytest.mark.parametrize("secret", ["another", "a secre", "a secret "])
@pytest.mark.parametrize("first", ["is_there", "call"])
def test_a_task_with_another_secret_is_refused(service: tuple[Service, str], secret: str, first: str) -> None:
    stranger = Peer("ps 0 (here)", service[1], secret)
    began = time.monotonic()
    with pytest.raises(
        ClusterConfigError, match=r"(?s)ps 0 \(here\) failed to authenticate.*KDIST_CLUSTER_TOKEN"
    ):
        stranger.is_there(60) if first == "is_there" else stranger.call("echo")
    assert time.monotonic() - began < 10
    stranger.close()


# An unauthorized caller may have the root certificate, but not its key.
STRANGERS = {
    "plain": lambda: None,
    "no certificate": lambda: grpc.ssl_channel_credentials(tls._identity(SECRET)[2]),
    "own certificate": lambda: grpc.ssl_channel_credentials(
        tls._identity(SECRET)[2], *tls._identity("another")[:2]
    ),
}


@pytest.mark.kills("servers_caller_not_authenticated")
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_caller_that_cannot_prove_that_it_knows_the_secret_is_not_read(kind: str) -> None:
    (address,) = local_addresses(1)
    heard: list[Any] = []
    service = Service(address, lambda header: lambda header, arrays: heard.append(header) or ({}, ()), SECRET)
    try:
        options = [("grpc.ssl_target_name_override", tls.NAME)]
        credentials = STRANGERS[kind]()
        channel = (
            grpc.insecure_channel(address)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        )
        with channel, pytest.raises(grpc.RpcError):
            message = b"".join(rpc._written({"method": "echo"}, []))
            list(channel.unary_stream("/kdist/call")(message, timeout=10))
        peer = Peer("ps 0", address, SECRET)
        assert not heard
        assert peer.call("echo")[0] == {}  # the service still answers
        peer.close()
    finally:
        service.stop()


@contextlib.contextmanager
def in_the_middle(address: str, delay: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """Forwards all traffic after a delay, and records it. Yields its address and the recording."""
    seen: list[bytes] = []
    host, _, port = address.rpartition(":")

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one side has closed the connection
            while data := source.recv(1 << 16):
                time.sleep(delay)
                seen.append(data)
                target.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection((host, int(port)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", seen


def test_neither_side_shows_the_secret_or_a_message(service: tuple[Service, str]) -> None:
    with in_the_middle(service[1]) as (address, seen):
        peer = Peer("ps 0", address, SECRET)
        said = "what nobody else reads"
        assert peer.call("echo", {"said": said})[0] == {"heard": said}
        peer.close()
    copied = b"".join(seen)
    assert len(copied) > 1000
    assert SECRET.encode() not in copied
    assert b"nobody" not in copied


@pytest.mark.kills("servers_slow_handshake_given_up")
def test_a_slow_handshake_is_waited_for(service: tuple[Service, str]) -> None:
    with in_the_middle(service[1], delay=0.4) as (address, _):
        peer = Peer("ps 0", address, SECRET)
        assert peer.is_there(20)
        peer.close()


@pytest.mark.kills("servers_one_key_for_all_secrets")
def test_the_key_is_that_of_the_secret() -> None:
    def public_key(secret: str, number: int) -> Any:
        from cryptography import x509

        found = x509.load_pem_x509_certificate(tls._identity.__wrapped__(secret)[number])
        return found.public_key().public_numbers()

    assert public_key("one", 1) == public_key("one", 1) == public_key("one", 2)
    assert public_key("one", 1) != public_key("two", 1)


def test_a_silent_stranger_is_not_waited_for_longer_than_a_task() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer("ps 1", f"127.0.0.1:{silent.getsockname()[1]}", SECRET)
        began = time.monotonic()
        assert not peer.is_there(0.5)
        assert time.monotonic() - began < 5
        peer.close()


def test_at_loopback_a_service_listens_nowhere_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterConfigError, match="Cannot listen on port"):
            Service(f"127.0.0.1:{port}", handler_of, SECRET)


def message(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return rpc._LENGTH.pack(len(text)) + text + data


HUGE = 1 << 46
MALFORMED = {
    "nothing": [],
    "empty": [b""],
    "half a length": [b"\0\0"],
    "a length without a header": [rpc._LENGTH.pack(2**32 - 1)],
    "no JSON": [message(b"{]")],
    "no text": [message(b"\xff\xfe")],
    "deep": [message(b"[" * 100_000)],
    "no object": [message([1])],
    "no arrays": [message({})],
    "arrays of another kind": [message({"arrays": 7})],
    "huge": [message({"arrays": [["uint8", [HUGE]]]}, b"data")],
    "huge together": [message({"arrays": [["uint8", [0]], ["float64", [1 << 40, 1 << 20, 9]]]}, b"data")],
    "less than zero": [message({"arrays": [["uint8", [-1]]]}, b"data")],
    "two less than zero": [message({"arrays": [["uint8", [-2, -2]]]}, b"data")],
    "fractions": [message({"arrays": [["uint8", [1.5]]]}, b"data")],
    "a text for a shape": [message({"arrays": [["uint8", "11"]]}, b"data")],
    "huge axes without elements": [message({"arrays": [["uint8", [0, 1 << 47, 1 << 47]]]})],
    "what NumPy parses": [message({"arrays": [["f4,(", [1]]]}, b"12345678")],
    "many axes": [message({"arrays": [["uint8", [1] * 65]]}, b"data")],
    "pointers": [message({"arrays": [["O", [1]]]}, b"12345678")],
    "named pointers": [message({"arrays": [["object", [1]]]}, b"12345678")],
    "fields": [message({"arrays": [["f4,f4", [1]]]}, b"12345678")],
    "a list for a dtype": [message({"arrays": [[[["a", "O"]], [1]]]}, b"12345678")],
    "a name of the module of dtypes": [message({"arrays": [["finfo", [1]]]}, b"12345678")],
    "no data": [message({"arrays": [["uint8", [1 << 20]]]})],
    "too few data": [message({"arrays": [["uint8", [1 << 20]]]}), b"data"],
    "too many data": [message({"arrays": [["uint8", [1]]]}, b"data")],
    "more messages": [message({"arrays": [["uint8", [4]]]}, b"data"), b"data"],
}


@pytest.mark.kills(servers_memory_before_data="[huge]", servers_pointers_taken="[named pointers]")
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_messages_are_errors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def aligned_empty(shape: Any, dtype: Any) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr(rpc, "aligned_empty", aligned_empty)
    with pytest.raises(CallFailed, match="malformed message"):
        rpc._read(iter(MALFORMED[kind]))
    assert sum(one.nbytes for one in made) <= sum(map(len, MALFORMED[kind])) or kind == "too few data"
    if kind in ("huge", "huge together", "no data"):
        assert not any(one.nbytes for one in made)


def test_a_service_goes_on_after_malformed_messages(service: tuple[Service, str], peer: Peer) -> None:
    for kind, messages in MALFORMED.items():
        answer = peer._channel.stream_stream("/kdist/call")(iter(messages), timeout=10)
        header, _ = rpc._read(answer)
        assert "malformed message" in header["failed"], kind
    assert peer.call("echo", {"said": 5})[0] == {"heard": 5}


def test_a_message_has_a_largest_size(peer: Peer) -> None:
    with pytest.raises(CallFailed, match=r"Calling 'echo' on .*larger than max"):
        peer.call("echo", {"said": "x" * (rpc._MOST_HEADER + rpc._CHUNK)})
    assert peer.call("echo", {"said": 6})[0] == {"heard": 6}


@pytest.mark.kills("servers_calls_without_limit")
def test_a_service_runs_a_limited_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_MOST_CALLS", 2)
    (address,) = local_addresses(1)
    go_on, arrived = threading.Event(), threading.Semaphore(0)

    def wait(header: Any, arrays: Any) -> Any:
        arrived.release()
        go_on.wait(30)
        return {}, ()

    service = Service(address, lambda header: wait, SECRET)
    peer = Peer("ps 0", address, SECRET)
    try:
        waits = [peer.begin("wait") for _ in range(2)]
        assert all(arrived.acquire(timeout=10) for _ in waits)
        with pytest.raises(CallFailed, match="limit"):
            peer.call("wait", timeout=10)
        go_on.set()
        assert [wait()[0] for wait in waits] == [{}, {}]
    finally:
        go_on.set()
        peer.close()
        service.stop()


def test_a_port_that_is_taken(service: tuple[Service, str]) -> None:
    with pytest.raises(ClusterConfigError, match=f"(?s)Cannot listen on port.*{service[1]}.*another port"):
        Service(service[1], handler_of, SECRET)


@pytest.mark.parametrize("package", ["grpc", "cryptography.x509"])
def test_an_error_names_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tls._identity.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    for make in (
        lambda: Peer("ps 0", "localhost:1", SECRET),
        lambda: Service("localhost:1", handler_of, SECRET),
    ):
        with pytest.raises(
            InvalidArgumentError, match=rf"(?s)Cannot import {package}, .*pip install '\.\[servers\]'"
        ):
            make()
