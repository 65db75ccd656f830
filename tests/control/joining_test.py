"""A process joins only one cluster, only once, and waits for the other workers until the join timeout."""

from __future__ import annotations

import atexit

import pytest

from kdist.cluster import Cluster, discover
from kdist.control import joining
from kdist.errors import InvalidArgumentError, StrategyScopeError, WorkerMismatchError
from tests.helpers.joining import channels
from tests.helpers.scripts import tf_config


class Joined:
    """A fake of the connection that a backend returns."""

    def __init__(self, open_channel: joining.OpenChannel, waited: float) -> None:
        self.waited = waited
        self.limits: list[float | None] = []

    def limit_time(self, seconds: float | None) -> None:
        self.limits.append(seconds)

    def close(self) -> None:
        """Does nothing."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_joined", None)
    monkeypatch.setattr(atexit, "register", lambda close: None)
    monkeypatch.delenv("KDIST_JOIN_TIMEOUT", raising=False)


def cluster(*addresses: str) -> Cluster:
    return discover(environ={"TF_CONFIG": tf_config(list(addresses), 0)})


def test_strategies_of_one_cluster_share_the_connection() -> None:
    first = joining.join_once(cluster("a:1", "b:1"), 5.0, Joined)
    assert first.waited == 300
    assert joining.join_once(cluster("a:1", "b:1"), 7.0, Joined) is first
    assert first.limits == [7.0], "The first one's limit is its own to set."


def test_another_cluster_is_an_error() -> None:
    joining.join_once(cluster("a:1", "b:1"), None, Joined)
    for other in (cluster("a:1", "c:1"), cluster("a:1", "b:1", "c:1")):
        with pytest.raises(StrategyScopeError, match="already joined another cluster"):
            joining.join_once(other, None, Joined)


def test_the_time_to_wait_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_JOIN_TIMEOUT", "2.5")
    assert joining.join_once(cluster("a:1", "b:1"), None, Joined).waited == 2.5


@pytest.mark.kills("join_failure_reported_as_end")
def test_the_others_get_the_error_of_a_worker_that_fails_while_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with channels(2) as (chief, other):
        monkeypatch.setattr(joining, "connect_workers", lambda *_: ((), other))

        def connect(open_channel: joining.OpenChannel, timeout: float) -> Joined:
            open_channel(None)
            raise ValueError("no such device")

        with pytest.raises(ValueError, match="no such device"):
            joining.join_once(cluster("a:1", "b:1"), None, connect)
        assert chief.wait_for_loss(10) == {1: "it failed: ValueError: no such device"}


@pytest.mark.kills("join_timeout_not_checked")
@pytest.mark.parametrize("text", ["5 minutes", "0", "inf", "nan"])
def test_a_time_that_is_none_is_an_error_that_says_the_rule(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("KDIST_JOIN_TIMEOUT", text)
    with pytest.raises(InvalidArgumentError, match="not a number of seconds of at least 1") as raised:
        joining.join_once(cluster("a:1", "b:1"), None, Joined)
    assert f"KDIST_JOIN_TIMEOUT={text!r}" in str(raised.value)
    assert "export KDIST_JOIN_TIMEOUT=300" in str(raised.value)


def test_workers_of_other_devices_are_told() -> None:
    joining.check_devices(["worker 0", "worker 1"], [("gpu", 2), ("gpu", 2)])
    for theirs in (("gpu", 1), ("cpu", 2)):
        with pytest.raises(WorkerMismatchError, match="Workers have different devices") as raised:
            joining.check_devices(["worker 0", "worker 1"], [("gpu", 2), theirs])
        assert f"{theirs[1]} {theirs[0]}" in str(raised.value)
