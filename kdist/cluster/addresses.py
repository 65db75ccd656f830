"""Addresses and ports: parses `host:port`, finds free ports, and reports used ports."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket

from kdist.cluster import environment
from kdist.errors import ClusterConfigError

# The system may assign ports above this range to outgoing connections at any time.
_PORTS = "15000-31999"


def split_address(address: object, field: str = "address") -> tuple[str, int]:
    """Splits `host:port` into the host (without brackets) and the port, and validates both.

    An IPv6 host must be in square brackets. Error messages contain `field`, the name of the text.

    Raises:
        ClusterConfigError: If the address does not have the form `host:port`, or the port is not in 1..65535.

    Example:

    >>> from kdist.cluster import split_address
    >>> split_address("host0:2222")
    ('host0', 2222)
    >>> split_address("[::1]:2222")
    ('::1', 2222)
    """
    if not isinstance(address, str):
        raise _address_error(field, address, "is not a string of the form host:port")
    if "://" in address or "/" in address:
        raise _address_error(field, address, "contains a protocol or a path")
    host, colon, port_text = address.rpartition(":")
    if not colon or not host:
        raise _address_error(field, address, "does not have the form host:port")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not host or any(c.isspace() or c in "[]," for c in host) or (":" in host and not bracketed):
        raise _address_error(
            field, address, "does not have the form host:port (an IPv6 host needs square brackets)"
        )
    if not (port_text.isascii() and port_text.isdigit()):
        raise _address_error(field, address, "does not end with a port number")
    if len(port_text) > 5 or not 1 <= int(port_text) <= 65535:
        raise _address_error(field, address, "does not have a port between 1 and 65535")
    return host, int(port_text)


def _address_error(field: str, address: object, problem: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"`{field}` {problem}.",
        received={field: address},
        hint='Write it as host:port, for example "host0:2222" or "[::1]:2222".',
    )


def join_address(host: str, port: int) -> str:
    """Joins a host and a port. Puts an IPv6 host in square brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a host name or IP address is certainly a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, even one such as 127.example.org


def hold_free_ports(count: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Returns sockets that are bound to free ports, so that no other process takes them before they are needed.

    Get the ports with `getsockname()[1]`. Close each socket just before you use its port. The ports are in
    `KDIST_PORT_RANGE`. By default they are below the range for outgoing connections: the system could assign a
    port in that range between the close of the returned socket and the worker's `bind`.

    Raises:
        ClusterConfigError: If there are not enough free ports, or `KDIST_PORT_RANGE` is not a range.
    """
    ports = _port_range()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held: list[socket.socket] = []
    candidates = random.SystemRandom().sample(ports, min(200 + 20 * count, len(ports)))
    if environment.get("KDIST_PORT_RANGE") is None:
        candidates += [0] * count  # as the last resort, 0 lets the system choose
    try:
        for port in candidates:
            if len(held) == count:
                break
            candidate = socket.socket(family, socket.SOCK_STREAM)
            try:
                candidate.bind((host, port))
                held.append(candidate)
            except OSError as error:
                candidate.close()
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
    except OSError as error:
        _close(held)
        raise ClusterConfigError(
            f"Cannot open a port on host {host!r}.",
            received={"host": host, "error": str(error)},
            hint='Use "127.0.0.1" for a job on one machine. Otherwise, use an address of this machine.',
        ) from error
    if len(held) < count:
        _close(held)
        raise ClusterConfigError(
            "This machine does not have enough free ports.",
            received={"wanted": count, "free": len(held), "ports": f"{ports[0]}-{ports[-1]}"},
            hint="Terminate other jobs on this machine, start fewer workers, or set KDIST_PORT_RANGE.",
        )
    return held


def _port_range() -> range:
    text = environment.get("KDIST_PORT_RANGE") or _PORTS
    lowest, _, highest = text.partition("-")
    if lowest.strip().isdecimal() and highest.strip().isdecimal():
        ports = range(int(lowest), int(highest) + 1)
        if ports and ports[0] >= 1 and ports[-1] <= 65535:
            return ports
    raise ClusterConfigError(
        "`KDIST_PORT_RANGE` is not a range of ports.",
        received={"KDIST_PORT_RANGE": text},
        hint='Write the first and the last port, for example "15000-31999".',
    )


def _close(sockets: list[socket.socket]) -> None:
    for held in sockets:
        held.close()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns the numbers of ports that are currently free on an address of this machine.

    Raises:
        ClusterConfigError: If there are not enough free ports.

    Example:

    >>> from kdist.cluster import free_ports
    >>> len(set(free_ports(3)))
    3
    """
    held = hold_free_ports(count, host)
    ports = [kept.getsockname()[1] for kept in held]
    _close(held)
    return ports


def check_port_free(address: str) -> None:
    """Checks that this machine can listen at an address.

    Raises:
        ClusterConfigError: If the port is in use, or the host is not this machine or cannot be resolved.

    Example:

    >>> from kdist.cluster import check_port_free, free_ports
    >>> check_port_free(f"127.0.0.1:{free_ports(1)[0]}")
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterConfigError(
            f"The host name of {address} cannot be resolved.",
            received={"address": address, "error": str(error)},
            hint=f"Check the name on this machine:\ngetent hosts {host}",
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # Servers also set this option, so a port with a recently closed connection (TIME_WAIT) is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            raise port_error(address, port, error) from error


def port_error(address: str, port: int, error: OSError) -> ClusterConfigError:
    """Converts the system's error into the error of a worker that cannot listen at an address."""
    if error.errno == errno.EADDRNOTAVAIL:
        return ClusterConfigError(
            "Cannot listen at the address of this worker: it is not an address of this machine.",
            received={"address": address},
            hint="Check the index of this worker and the order of the hosts.",
        )
    return ClusterConfigError(
        f"Cannot listen on port {port}: {error.strerror}.",
        received={"address": address},
        hint="Choose another port, or find the process that uses the port and terminate it:\n"
        f"ss -ltnp 'sport = :{port}'",
    )


def cannot_listen(address: str) -> ClusterConfigError:
    """Returns the error of a task if its framework could not listen and does not report the reason."""
    error = OSError(errno.EADDRINUSE, "another process listens there")
    return port_error(address, split_address(address)[1], error)
