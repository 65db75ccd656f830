"""Strangers send changed bytes to the sockets of a job: it continues, or ends in time with an error from kdist."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from random import Random

import pytest

from kdist.cluster import discover
from kdist.control import rendezvous
from kdist.errors import KdistError
from tests.fuzz.mutate import change_bytes
from tests.helpers.joining import addresses_of
from tests.helpers.ports import neighboring_ports
from tests.helpers.scripts import local_addresses

SEED = "kdist 28"
NUMBER = 200
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x0c\x01\x04\0\0\0\x01\x82\x86\x44\x0c/kdist/call!!"
TLS = b"\x16\x03\x01\x00\x2e\x01\x00\x00\x2a\x03\x03" + bytes(range(38)) + b"\x00\x02\x13\x01\x01\x00"


def throw(place, good, seed, ended=lambda: False):
    """Connects repeatedly and sends changed bytes; leaves some connections open, and returns them."""
    open_ones = []
    for number in range(NUMBER):
        random = Random(f"{seed}:{number}")
        with contextlib.suppress(OSError):
            connection = socket.create_connection(place, timeout=2)
            connection.sendall(change_bytes(random, random.choice(good), good)[:5000])
            if number % 10 == 0:
                open_ones.append(connection)
                continue
            if number % 3 == 0:
                connection.settimeout(0.02)
                with contextlib.suppress(OSError):
                    connection.recv(100)
            connection.close()
        if ended():
            break
    return open_ones


@pytest.mark.timeout(90)
def test_strangers_where_workers_meet(monkeypatch):
    monkeypatch.setenv("KDIST_CLUSTER_TOKEN", "a secret")
    port = neighboring_ports(2)
    environ = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    clusters = [discover(environ={**environ, "RANK": str(rank)}) for rank in range(3)]
    found = {}

    def meet(cluster):
        try:
            found[cluster.worker_index] = addresses_of(cluster, 20.0)
        except KdistError as error:
            found[cluster.worker_index] = error

    workers = [threading.Thread(target=meet, args=(cluster,), daemon=True) for cluster in clusters]
    workers[0].start()
    said = json.dumps({"worker": 1, "num_workers": 3, "address": "6.6.6.6:1"}).encode()
    good = [
        said + b"\n",
        b"kdh1\0\0\0\x20" + bytes(32),
        b"kdc1H\0\0\0\x01" + bytes(8),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    place = rendezvous._places(clusters[0], None)[0]
    open_ones = throw(place, good, SEED, lambda: 0 in found)
    for worker in workers[1:]:
        worker.start()
    for worker in workers:
        worker.join(40)
    for connection in open_ones:
        connection.close()
    assert found.keys() == {0, 1, 2}, "a worker hangs or has crashed"
    if hasattr(rendezvous, "handshake"):  # strangers without the secret have no effect
        assert len(set(found.values())) == 1 and not isinstance(found[0], KdistError), found


@pytest.mark.timeout(90)
def test_strangers_at_a_parameter_server():
    from kdist.coordinator.rpc import Peer, Service

    called = []

    def echo(header, arrays):
        called.append(header)
        return {"heard": header["said"]}, arrays

    (address,) = local_addresses(1)
    service = Service(address, lambda header: echo, "a secret")
    try:
        host, _, port = address.rpartition(":")
        open_ones = throw(
            (host, int(port)), [HTTP2, TLS, b"\x80\x05c\x05posix\x8c\x06system\x94\x93\x94"], SEED
        )
        assert called == []
        peer = Peer("ps 0", address, "a secret")
        try:
            assert peer.call("echo", {"said": 3}, timeout=20)[0] == {"heard": 3}
        finally:
            peer.close()
        for connection in open_ones:
            connection.close()
    finally:
        service.stop()
