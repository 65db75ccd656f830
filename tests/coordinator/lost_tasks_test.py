"""Tasks that never start, exit or stop are noticed, and busy tasks are not lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from kdist.coordinator.rpc import Peer, PeerLost, Service
from tests.coordinator.rpc_test import SECRET, handler_of
from tests.helpers.scripts import local_addresses


def test_a_task_that_never_comes() -> None:
    peer = Peer("ps 1 (nowhere)", *local_addresses(1), SECRET)
    began = time.monotonic()
    assert not peer.is_there(0.3)
    assert time.monotonic() - began < 5
    with pytest.raises(PeerLost, match=r"ps 1 \(nowhere\) has exited or is unreachable"):
        peer.call("echo")
    peer.close()


def test_a_task_that_ends_in_the_middle_of_a_call_is_noticed() -> None:
    (address,) = local_addresses(1)
    service = Service(address, handler_of, SECRET)
    peer = Peer("worker 0", address, SECRET)
    assert peer.is_there(10)
    lost = threading.Event()
    stop = peer.watch(lost.set)
    wait = peer.begin("stay")
    assert not lost.wait(0.2)
    service.stop()
    with pytest.raises(PeerLost, match="worker 0"):
        wait()
    assert lost.wait(5)
    # The peer finds a new service at the same address.
    another = Service(address, handler_of, SECRET)
    assert peer.is_there(10)
    assert peer.call("echo", {"said": 3})[0] == {"heard": 3}
    stop()
    peer.close()
    another.stop()


SCRIPT = """
import ctypes, sys
from kdist.coordinator.rpc import Service
hold = ctypes.PyDLL(None).sleep  # without releasing the interpreter lock
Service(sys.argv[1], lambda header: lambda header, arrays: ({"left": hold(4)}, ()), "a secret")
sys.stdin.read()
"""


@pytest.mark.kills("stopped_task_noticed_after_a_minute", "rpc_without_the_heartbeat_timeout")
def test_a_stopped_task_is_noticed_and_a_busy_task_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_HEARTBEAT_TIMEOUT", "3")
    (address,) = local_addresses(1)
    peer = Peer("worker 0", address, SECRET)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, address], stdin=subprocess.PIPE) as process:
        try:
            assert peer.is_there(60)
            assert peer.call("hold")[0] == {"left": 0}
            wait = peer.begin("hold")
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(PeerLost, match="worker 0"):
                wait()
            assert time.monotonic() - began < 12
        finally:
            process.kill()
            peer.close()


def test_who_stops_watching_is_not_told() -> None:
    (address,) = local_addresses(1)
    service = Service(address, handler_of, SECRET)
    peer = Peer("worker 0", address, SECRET)
    told: list[int] = []
    stop = peer.watch(lambda: told.append(1))
    peer.call("echo")
    stop()
    service.stop()
    peer.close()
    time.sleep(0.2)
    assert not told
