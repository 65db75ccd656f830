"""Finds consecutive free ports, as for the workers of one machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from kdist.cluster import free_ports


def neighboring_ports(number: int, hosts: Sequence[str] = ("127.0.0.1",)) -> int:
    """Returns the first of some consecutive ports that are free on each host.

    The ports are below the system's range for outgoing connections, as with `free_ports`.
    """
    for _ in range(100):
        first = free_ports(1, hosts[0])[0]
        with contextlib.ExitStack() as held:
            try:
                for host in hosts:
                    for port in range(first, first + number):
                        held.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
        return first
    raise AssertionError(f"{number} ports in a row must be free on {hosts}")
