"""Addresses, ports, the process environment, and the exchange of addresses."""

import dataclasses
import json
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import (
    check_port_free,
    complete_addresses,
    discover,
    environment,
    free_ports,
    hold_free_ports,
    is_loopback,
    join_address,
    keras_backend_choice,
    keras_backend_name,
    split_address,
    visible_gpus,
)
from kdist.errors import ClusterConfigError, WorkerTimeoutError


@given(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65535))
def test_address_round_trip(host, port):
    assert split_address(join_address(host, port)) == (host, port)


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_ipv6_round_trip(host, port):
    assert split_address(join_address(str(host), port)) == (str(host), port)


@given(st.text(max_size=12) | st.integers() | st.none())
def test_anything_else_is_named(address):
    try:
        host, port = split_address(address, "my field")
        assert host and 1 <= port <= 65535
    except ClusterConfigError as error:
        assert "my field" in str(error)  # noqa: PT017


def test_loopback():
    assert is_loopback("localhost") and is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("host0")


def test_held_ports_are_taken_until_released():
    held = hold_free_ports(3)
    ports = [kept.getsockname()[1] for kept in held]
    assert len(set(ports)) == 3
    held[0].listen()
    with pytest.raises(ClusterConfigError, match=f"Cannot listen on port {ports[0]}") as info:
        check_port_free(f"127.0.0.1:{ports[0]}")
    assert f"sport = :{ports[0]}" in str(info.value)
    for kept in held:
        kept.close()
    check_port_free(f"127.0.0.1:{ports[0]}")


@pytest.mark.kills("port_range_ignored")
def test_ports_come_from_the_given_range():
    first = free_ports(1)[0]
    with environment.patched(KDIST_PORT_RANGE=f" {first} - {first} "):
        held = hold_free_ports(1)
        assert held[0].getsockname()[1] == first
        with pytest.raises(ClusterConfigError, match="not have enough free ports"):
            hold_free_ports(1)
        held[0].close()
    for wrong in ("15000", "15000-", "200-100", "0-10", "60000-70000", "a-b"):
        with (
            environment.patched(KDIST_PORT_RANGE=wrong),
            pytest.raises(ClusterConfigError, match="not a range of ports"),
        ):
            free_ports(1)


def test_port_of_another_machine():
    with pytest.raises(ClusterConfigError, match="not an address of this machine"):
        check_port_free("192.0.2.1:5000")
    with pytest.raises(ClusterConfigError, match="resolved"):
        check_port_free("no-such-host.invalid:5000")


def test_patched_restores():
    os.environ.pop("KDIST_TEST_A", None)
    with environment.patched(KDIST_TEST_A=1, HOME=None):
        assert environment.get("KDIST_TEST_A") == "1" and environment.get("HOME") is None
    assert environment.get("KDIST_TEST_A") is None and environment.get("HOME") is not None


def test_set_default():
    with environment.patched(KDIST_TEST_A=None):
        assert environment.set_default("KDIST_TEST_A", 1) == "1"
        assert environment.set_default("KDIST_TEST_A", 2) == "1"


def test_backend_name(tmp_path):
    home = {"KERAS_HOME": str(tmp_path)}
    assert keras_backend_name(home) == "tensorflow"
    (tmp_path / "keras.json").write_text("not json")
    assert keras_backend_name(home) == "tensorflow"
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "Torch"}))
    assert keras_backend_name(home) == "torch"
    assert keras_backend_name({"HOME": str(tmp_path)}) == "tensorflow"
    assert keras_backend_choice({**home, "KERAS_BACKEND": " JAX "}) == ("jax", "KERAS_BACKEND is set")


def test_visible_gpus(monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0, GPU-abc"}) == ["0", "GPU-abc"]
    for none in ("", "-1", "NoDevFiles", "-1,0"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": none}) == []
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: ["/dev/nvidia3", "/dev/nvidia5"])
    assert visible_gpus({}) == [
        "0",
        "1",
    ]  # in a container, the files keep their numbers, but CUDA counts from 0


def _clusters(count, port, **extra):
    environ = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **extra}
    return [discover(environ={**environ, "RANK": str(index)}) for index in range(count)]


def _exchange(clusters, timeout=10.0):
    found = [None] * len(clusters)

    def work(position):
        try:
            found[position] = complete_addresses(clusters[position], timeout)
        except Exception as error:
            found[position] = error

    threads = [threading.Thread(target=work, args=(position,)) for position in range(len(clusters))]
    for thread in reversed(threads):  # worker 0 starts last, so the others must wait for it
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(timeout + 10)
        assert not thread.is_alive()
    return found


@pytest.mark.kills("cluster_addresses_in_another_order")
def test_exchange():
    port = free_ports(1)[0]
    found = _exchange(_clusters(3, port))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == f"127.0.0.1:{port}"
    assert len(set(found[0])) == 3 and all(split_address(a)[0] == "127.0.0.1" for a in found[0])


def test_exchange_beside_torchruns_agent():
    agent = socket.create_server(("127.0.0.1", 0))
    with agent:
        port = agent.getsockname()[1]
        found = _exchange(_clusters(2, port, TORCHELASTIC_USE_AGENT_STORE="True"))
    assert found[0] == found[1] and found[0][0] != f"127.0.0.1:{port}"


def test_nothing_is_sent_where_all_is_known():
    text = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
    assert complete_addresses(discover(environ={"TF_CONFIG": text})) == ("a:1", "b:1")
    assert len(complete_addresses(discover(environ={}))) == 1


def test_exchange_names_who_is_missing():
    clusters = _clusters(4, free_ports(1)[0])
    found = _exchange([clusters[0], clusters[2]], timeout=1.0)
    for error in found:
        assert isinstance(error, WorkerTimeoutError)
        assert "did not join within 1 s: worker 1, worker 3." in str(error) and "timeout" in str(error)


def test_exchange_without_worker_0():
    cluster = _clusters(2, free_ports(1)[0])[1]
    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match="Worker 0 did not respond"):
        complete_addresses(cluster, timeout=0.5)
    assert time.monotonic() - start < 5


def test_exchange_refuses_workers_that_disagree():
    clusters = _clusters(2, free_ports(1)[0])
    clusters[1] = dataclasses.replace(clusters[1], num_workers=3, addresses=(*clusters[1].addresses, None))
    assert isinstance(_exchange(clusters, timeout=2.0)[0], ClusterConfigError)


@pytest.mark.kills("cluster_two_workers_of_one_index")
def test_exchange_refuses_two_workers_of_one_index():
    first, second, _ = _clusters(3, free_ports(1)[0])
    found = _exchange([first, second, second], timeout=2.0)
    assert isinstance(found[0], ClusterConfigError) and "already in use" in str(found[0])
    assert all(isinstance(error, (ClusterConfigError, WorkerTimeoutError)) for error in found)


def test_exchange_finds_another_port(monkeypatch):
    # Worker 0 first tries the port next to the coordinator's, which is in use. It never uses the coordinator's.
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert len(set(_exchange(_clusters(2, taken - 1)))) == 1
        monkeypatch.setattr("kdist.cluster.exchange._meeting_places", lambda _: [("127.0.0.1", taken)])
        with pytest.raises(ClusterConfigError, match=f"127.0.0.1:{taken}='Address already in use'"):
            complete_addresses(_clusters(2, taken - 1)[0], timeout=1.0)
