"""Calls between tasks: what is sent arrives, who may not call is told so, and who ends is noticed."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from kdist.coordinator import rpc
from kdist.coordinator.rpc import CallFailed, Peer, PeerLost, Service
from kdist.errors import ClusterConfigError, InvalidArgumentError
from tests.processes import local_addresses


def echo(header: Any, arrays: Any) -> Any:
    return {"heard": header.get("said")}, arrays


def fail(header: Any, arrays: Any) -> Any:
    raise KeyError("a mistake of its own")


def stay(header: Any, arrays: Any) -> Any:
    time.sleep(5)
    return {}, ()


HANDLERS = {"echo": echo, "fail": fail, "stay": stay}


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Service, str]]:
    (address,) = local_addresses(1)
    made = Service(address, HANDLERS, "a secret")
    yield made, address
    made.stop()


@pytest.fixture(scope="module")
def peer(service: tuple[Service, str]) -> Iterator[Peer]:
    made = Peer("ps 0 (here)", service[1], "a secret")
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
    for mine, theirs in zip(sent, found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


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


@pytest.mark.parametrize("token", [None, "another", "a secre", "a secret "])
def test_who_has_not_the_token_may_not_call(service: tuple[Service, str], token: str | None) -> None:
    stranger = Peer("ps 0 (here)", service[1], token)
    with pytest.raises(ClusterConfigError, match=r"same token.*ps 0 \(here\).*KDIST_CLUSTER_TOKEN"):
        stranger.call("echo")
    stranger.close()


def test_a_service_without_a_token_lets_all_call() -> None:
    (address,) = local_addresses(1)
    service = Service(address, HANDLERS, None)
    for token in (None, "any"):
        peer = Peer("ps 0", address, token)
        assert peer.call("echo", {"said": 2})[0] == {"heard": 2}
        peer.close()
    service.stop()


def test_a_port_that_is_taken(service: tuple[Service, str]) -> None:
    with pytest.raises(ClusterConfigError, match=f"must be free.*{service[1]}.*another port"):
        Service(service[1], HANDLERS, None)


def test_a_task_that_never_comes() -> None:
    peer = Peer("ps 1 (nowhere)", *local_addresses(1), None)
    began = time.monotonic()
    assert not peer.is_there(0.3)
    assert time.monotonic() - began < 5
    with pytest.raises(PeerLost, match=r"ps 1 \(nowhere\) has ended, or cannot be reached"):
        peer.call("echo")
    peer.close()


def test_a_task_that_ends_in_the_middle_of_a_call_is_noticed() -> None:
    (address,) = local_addresses(1)
    service = Service(address, HANDLERS, None)
    peer = Peer("worker 0", address, None)
    assert peer.is_there(10)
    lost = threading.Event()
    stop = peer.watch(lost.set)
    wait = peer.begin("stay")
    assert not lost.wait(0.2)
    service.stop()
    with pytest.raises(PeerLost, match="worker 0"):
        wait()
    assert lost.wait(5)
    # Another one in its place is found.
    another = Service(address, HANDLERS, None)
    assert peer.is_there(10)
    assert peer.call("echo", {"said": 3})[0] == {"heard": 3}
    stop()
    peer.close()
    another.stop()


def test_who_stops_watching_is_not_told() -> None:
    (address,) = local_addresses(1)
    service = Service(address, HANDLERS, None)
    peer = Peer("worker 0", address, None)
    told: list[int] = []
    stop = peer.watch(lambda: told.append(1))
    peer.call("echo")
    stop()
    service.stop()
    peer.close()
    time.sleep(0.2)
    assert not told


def test_without_grpcio_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        InvalidArgumentError, match=r"grpcio is not installed.*pip install 'kdist\[servers\]'"
    ):
        Peer("ps 0", "localhost:1", None)
    with pytest.raises(InvalidArgumentError, match="grpcio is not installed"):
        Service("localhost:1", HANDLERS, None)
