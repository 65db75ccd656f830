"""Addresses, ports and the process environment."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster import (
    check_port_free,
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
from kdist.errors import ClusterConfigError


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
