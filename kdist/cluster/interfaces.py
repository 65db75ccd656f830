"""Chooses the network interface from this worker to the others, for gloo and NCCL."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

from kdist.cluster import environment
from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.discovery import Cluster

_SIOCGIFADDR = 0x8915  # on Linux, gets the address of a network interface


def interface_towards(cluster: Cluster) -> str | None:
    """Returns the network interface from this worker to the others, or `None` to let the backend choose.

    By default, gloo uses the address of this machine's host name. This may be a loopback address, which other
    machines cannot reach, or a public address although the job uses only one machine.
    """
    hosts = [split_address(address)[0] for address in (cluster.coordinator, *cluster.addresses) if address]
    if not hosts or all(is_loopback(host) for host in hosts):
        return _interface_of("127.0.0.1") if hosts else None
    for host in hosts:
        own = _address_towards(host)
        if own is not None and not is_loopback(own):
            return _interface_of(own)
    return None


def choose_nccl_interface(cluster: Cluster) -> None:
    """Sets the interface on which NCCL connects to the other machines, unless the user has set one.

    By default, NCCL uses the first interface that is up. An interface of Docker, for example, cannot reach
    other machines, so the first collective hangs. InfiniBand still carries the data if it is available.
    """
    hosts = [split_address(address)[0] for address in (cluster.coordinator, *cluster.addresses) if address]
    chosen = environment.get("NCCL_SOCKET_IFNAME") or environment.get("NCCL_COMM_ID")
    if chosen or all(is_loopback(host) for host in hosts) or _is_in_nccl_conf("NCCL_SOCKET_IFNAME"):
        return
    if interface := interface_towards(cluster):
        environment.set_default("NCCL_SOCKET_IFNAME", f"={interface}")  # = requires an exact match


def _is_in_nccl_conf(name: str) -> bool:
    for path in (environment.get("NCCL_CONF_FILE"), os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            if path and name in Path(path).read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def _address_towards(host: str) -> str | None:
    with contextlib.suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing; the kernel only looks up the route
                return str(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    return _interface_of_ipv6(address) if ":" in address else _interface_of_ipv4(address)


def _interface_of_ipv6(address: str) -> str | None:
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            found, *_, name = line.split()
            if found == digits:
                return name
    return None


def _interface_of_ipv4(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # not on Unix
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
