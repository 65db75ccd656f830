"""Joins the workers of a cluster in threads of one process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from kdist.cluster import Cluster
from kdist.control.channel import Channel
from kdist.control.rendezvous import connect_workers


def addresses_of(cluster: Cluster, timeout: float = 60.0) -> tuple[str, ...]:
    """Waits until all workers have joined, closes the connections, and returns the addresses of the workers."""
    addresses, channel = connect_workers(cluster, None, timeout)
    channel.close()
    return addresses


def sockets(count: int) -> list[dict[int, socket.socket]]:
    """Returns the connected sockets of each worker, by the index of the other worker."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for index in range(1, count):
            ends[index][0] = socket.create_connection(server.getsockname())
            ends[0][index] = server.accept()[0]
    return ends


@contextlib.contextmanager
def channels(count: int, timeout_seconds: float | None = None) -> Iterator[list[Channel]]:
    """A context with the channel of each worker."""
    names = [f"worker {index}" for index in range(count)]
    found = [Channel(names, index, ends, timeout_seconds) for index, ends in enumerate(sockets(count))]
    try:
        yield found
    finally:
        for channel in found:
            channel.leave()
        for channel in found:
            channel.close()
