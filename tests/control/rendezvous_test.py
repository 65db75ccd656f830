"""The rendezvous: workers that join, are missing, or do not belong to the job."""

import dataclasses
import socket
import threading
import time

import pytest

from kdist.cluster import discover, free_ports, split_address
from kdist.errors import ClusterConfigError, WorkerTimeoutError
from tests.helpers.joining import addresses_of


def _clusters(count, port, **extra):
    environ = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **extra}
    return [discover(environ={**environ, "RANK": str(index)}) for index in range(count)]


def _join(clusters, timeout=10.0):
    found = [None] * len(clusters)

    def work(position):
        try:
            found[position] = addresses_of(clusters[position], timeout)
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


@pytest.mark.kills("cluster_addresses_in_another_order", "workers_choose_the_same_port")
def test_all_workers_get_all_addresses():
    port = free_ports(1)[0]
    found = _join(_clusters(5, port))
    assert all(each == found[0] for each in found)
    assert found[0][0] == f"127.0.0.1:{port}"
    assert all(split_address(a)[0] == "127.0.0.1" for a in found[0])
    assert [split_address(a)[1] % 5 for a in found[0][1:]] == [1, 2, 3, 4], (
        "so that no two choose the same port"
    )


def test_the_rendezvous_beside_torchruns_agent():
    agent = socket.create_server(("127.0.0.1", 0))
    with agent:
        port = agent.getsockname()[1]
        found = _join(_clusters(2, port, TORCHELASTIC_USE_AGENT_STORE="True"))
    assert found[0] == found[1] and found[0][0] != f"127.0.0.1:{port}"


def test_the_rendezvous_names_who_is_missing():
    clusters = _clusters(4, free_ports(1)[0])
    found = _join([clusters[0], clusters[2]], timeout=1.0)
    for error in found:
        assert isinstance(error, WorkerTimeoutError)
        assert "2 of 4 workers did not join within 1 s: worker 1, worker 3." in str(error)
        assert "KDIST_JOIN_TIMEOUT" in str(error)


def test_the_rendezvous_without_worker_0():
    cluster = _clusters(2, free_ports(1)[0])[1]
    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match="did not join within 0.5 s: worker 0 "):
        addresses_of(cluster, timeout=0.5)
    assert time.monotonic() - start < 5


def test_the_rendezvous_refuses_workers_that_disagree():
    clusters = _clusters(2, free_ports(1)[0])
    clusters[1] = dataclasses.replace(clusters[1], num_workers=3, addresses=(*clusters[1].addresses, None))
    assert isinstance(_join(clusters, timeout=2.0)[0], ClusterConfigError)


@pytest.mark.kills("cluster_two_workers_of_one_index")
def test_the_rendezvous_refuses_two_workers_of_one_index():
    first, second, _ = _clusters(3, free_ports(1)[0])
    found = _join([first, second, second], timeout=2.0)
    assert isinstance(found[0], ClusterConfigError) and "Two processes have the same worker index" in str(
        found[0]
    )
    assert all(isinstance(error, (ClusterConfigError, WorkerTimeoutError)) for error in found)


def test_the_rendezvous_finds_another_port(monkeypatch):
    # Worker 0 first tries the port next to the coordinator's, which is in use. It never uses the coordinator's.
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert len(set(_join(_clusters(2, taken - 1)))) == 1
        monkeypatch.setattr("kdist.control.rendezvous._places", lambda *_: [("127.0.0.1", taken)])
        with pytest.raises(ClusterConfigError, match=f"127.0.0.1:{taken}='Address already in use'"):
            addresses_of(_clusters(2, taken - 1)[0], timeout=1.0)
