"""`complete_addresses`: how every worker learns every worker's address when the launcher tells only one.

TensorFlow needs them all; torchrun and MPI tell worker 0's. Each worker opens a connection to worker 0, says
where it can be reached, and gets the full list back. Lines of JSON, of limited size; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist.cluster.addresses import free_ports, is_loopback, join_address, split_address
from kdist.cluster.discovery import Cluster
from kdist.cluster.process_variables import stable_port
from kdist.errors import ClusterConfigError, WorkerTimeoutError

_MOST_BYTES = 4096  # of one worker's line; the reply may be longer, by its number of workers
_LOOK = 1.0  # seconds between two looks at who is missing
_SLACK = 3.0  # workers outwait worker 0, whose message says who is missing


def complete_addresses(
    cluster: Cluster, timeout: float = 60.0, note: Callable[[Collection[int]], None] = lambda missing: None
) -> tuple[str, ...]:
    """Returns the address of every worker, asking the others where the launcher told only worker 0's.

    All workers must call it together. Where all addresses are known nothing is sent. Otherwise worker 0
    listens beside its port for as long as the exchange takes; each worker picks a free port on the
    interface that leads to worker 0.

    Args:
        cluster: The cluster, as `discover` found it.
        timeout: How many seconds to wait for all workers.
        note: Called while it waits, about once a second, with the numbers of those that are missing: on worker 0 of
            all, on the others of worker 0 until it answers; and with those on account of whom it gives up.

    Returns:
        One address for each worker, the same on all of them.

    Raises:
        WorkerTimeoutError: If a worker does not come in time; the message names it.
        ClusterConfigError: If the workers do not belong together, or the port is taken.

    Example:

    >>> from kdist.cluster import complete_addresses, discover
    >>> tf_config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    >>> complete_addresses(discover(environ={"TF_CONFIG": tf_config}))
    ('a:1', 'b:1')
    """
    if cluster.num_workers == 1 or (all(cluster.addresses) and not cluster.coordinator_taken):
        return tuple(address or f"127.0.0.1:{free_ports(1)[0]}" for address in cluster.addresses)
    if cluster.coordinator is None:
        raise ClusterConfigError(
            "Worker 0's address must be known.",
            received={"addresses": cluster.addresses},
            hint="Set MASTER_ADDR and MASTER_PORT.",
        )
    deadline = time.monotonic() + timeout
    if cluster.worker_index == 0:
        return _gather(cluster, timeout, deadline, note)
    return _report(cluster, timeout, deadline + _SLACK, note)


def _meeting_places(cluster: Cluster) -> list[tuple[str, int]]:
    """Where worker 0 may listen, in the order in which it tries.

    torchrun's agent may hold the port itself, so they are those beside it; and some below the range from
    which the system gives ports to outgoing connections, for those beside may be taken at any moment.
    """
    host, port = split_address(cluster.coordinator)
    beside = [port + step if port + step <= 65535 else port - step for step in (1, 2)]
    derived = [stable_port([str(cluster.coordinator), str(number)]) + 1 for number in range(4)]
    return [(host, place) for place in dict.fromkeys([*beside, *derived]) if place != port]


def _greeting(cluster: Cluster) -> bytes:
    """What worker 0 says first, so that nobody mistakes another server, or another job, for it."""
    return json.dumps({"kdist": "addresses", "of": cluster.coordinator}).encode() + b"\n"


def _own_address(cluster: Cluster, host: str) -> str:
    known = cluster.addresses[cluster.worker_index]
    if known and not (cluster.worker_index == 0 and cluster.coordinator_taken):
        return known
    return join_address(host, free_ports(1, "127.0.0.1" if is_loopback(host) else "")[0])


def _gather(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> tuple[str, ...]:
    """Worker 0's side: waits for the others, then tells everybody."""
    addresses: dict[int, str] = {0: _own_address(cluster, split_address(cluster.coordinator)[0])}
    joined: list[socket.socket] = []
    with contextlib.ExitStack() as cleanup, selectors.DefaultSelector() as selector:
        server = cleanup.enter_context(_listen(cluster))
        selector.register(server, selectors.EVENT_READ)
        while len(addresses) < cluster.num_workers:
            ready = selector.select(min(_LOOK, max(0.0, deadline - time.monotonic())))
            missing = [index for index in range(cluster.num_workers) if index not in addresses]
            note(missing)
            if not ready and time.monotonic() >= deadline:
                _tell(joined, {"missing": missing, "timeout": timeout})
                raise _missing_error(missing, timeout)
            for key, _ in ready:
                if key.fileobj is server:
                    _accept(server, _greeting(cluster), selector, cleanup)
                    continue
                client: Any = key.fileobj
                line = _read_line(client, key.data, selector)
                if line is not None and _admit(line, cluster, addresses, joined):
                    joined.append(client)
        complete = tuple(addresses[index] for index in range(cluster.num_workers))
        _tell(joined, {"addresses": complete})
        return complete


def _listen(cluster: Cluster) -> socket.socket:
    refused: dict[str, str] = {}
    for host, port in _meeting_places(cluster):
        # Of several machines, the others reach worker 0 by a name that may mean the loopback interface here.
        where = host if is_loopback(host) else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((where, port), family=family, backlog=128)
        except OSError as error:
            refused[join_address(host, port)] = os.strerror(error.errno or 0)
    raise ClusterConfigError(
        "One of a few ports must be free while the workers tell each other their addresses.",
        received=refused,
        hint="Choose another MASTER_PORT.",
    )


def _accept(
    server: socket.socket,
    greeting: bytes,
    selector: selectors.BaseSelector,
    cleanup: contextlib.ExitStack,
) -> None:
    connection, _ = server.accept()
    connection.setblocking(False)
    cleanup.enter_context(connection)
    with contextlib.suppress(OSError):
        connection.send(greeting)  # a few bytes: they fit
    selector.register(connection, selectors.EVENT_READ, bytearray())


def _read_line(
    connection: socket.socket, line: bytearray, selector: selectors.BaseSelector
) -> bytearray | None:
    """Adds what has come to a line; returns it once it is complete. Strangers that talk on are cut off."""
    try:
        received = connection.recv(_MOST_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        received = b""
    line += received
    complete = b"\n" in line
    if complete or not received or len(line) > _MOST_BYTES:
        selector.unregister(connection)
        if not complete:
            connection.close()
    return line if complete else None


def _admit(line: bytearray, cluster: Cluster, addresses: dict[int, str], joined: list[socket.socket]) -> bool:
    """Takes a worker in; returns False for a stranger and raises for a worker that does not belong here."""
    try:
        said = json.loads(line)
        index, count, address = said["worker"], said["num_workers"], said["address"]
        split_address(address)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False  # not one of ours: a port scan, say
    valid = type(index) is int and 0 < index < cluster.num_workers
    if count == cluster.num_workers and valid and index not in addresses:
        addresses[index] = address
        return True
    problem = {"expected num_workers": cluster.num_workers, "num_workers": count, "worker": index}
    _tell(joined, {"problem": problem})
    raise _mismatch_error(problem)


def _mismatch_error(problem: dict[str, Any]) -> ClusterConfigError:
    return ClusterConfigError(
        "All workers must agree on their number, and each must have its own index.",
        received=problem,
        hint="Start all of them with the same launcher, or check RANK and WORLD_SIZE.",
    )


def _missing_error(missing: Sequence[int], timeout: float) -> WorkerTimeoutError:
    names = ", ".join(f"worker {index}" for index in missing)
    return WorkerTimeoutError(
        f"All workers must come within {timeout:g} s; {names} did not.",
        hint="Look at the output of the missing workers, or wait longer with a larger `timeout`.",
    )


def _tell(connections: list[socket.socket], message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(5.0)
            connection.sendall(line)


def _report(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> tuple[str, ...]:
    """Every other worker's side: tells worker 0 the own address and reads the list."""
    note([0])
    with _connect(cluster, timeout, deadline, note) as connection:
        own = _own_address(cluster, connection.getsockname()[0])
        said = {"worker": cluster.worker_index, "num_workers": cluster.num_workers, "address": own}
        try:
            connection.sendall(json.dumps(said).encode() + b"\n")
            reply = _read_reply(connection, deadline, 1024 * (cluster.num_workers + 4))
        except OSError as error:
            raise _lost_error(cluster, timeout, error) from error
    if "missing" in reply:
        missing = [index for index in range(cluster.num_workers) if index in reply["missing"]]
        note(missing)
        raise _missing_error(missing, timeout)
    if "problem" in reply:
        raise _mismatch_error(reply["problem"])
    try:
        addresses = tuple(reply["addresses"])
        for address in addresses:
            split_address(address)
    except (KeyError, TypeError, ValueError) as error:
        raise _lost_error(cluster, timeout, error) from error
    return addresses


def _connect(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> socket.socket:
    problem: Exception = TimeoutError()
    while time.monotonic() < deadline - _SLACK:
        for place in _meeting_places(cluster):
            patience = min(5.0, max(0.1, deadline - time.monotonic()))
            try:
                connection = socket.create_connection(place, timeout=patience)
            except OSError as error:  # worker 0 may still be importing its framework
                problem = error
                continue
            if _is_worker_0(connection, _greeting(cluster), min(1.0, patience)):
                return connection
            connection.close()
        note([0])
        time.sleep(0.1)
    raise _lost_error(cluster, timeout, problem) from problem


def _is_worker_0(connection: socket.socket, greeting: bytes, patience: float) -> bool:
    try:
        return _wait_for_line(connection, time.monotonic() + patience, len(greeting)) == greeting
    except OSError:
        return False


def _read_reply(connection: socket.socket, deadline: float, most: int) -> dict[str, Any]:
    try:
        reply = json.loads(_wait_for_line(connection, deadline, most))
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise ConnectionResetError("the answer was not that of a worker")
    return reply


def _wait_for_line(connection: socket.socket, deadline: float, most: int) -> bytes:
    """Reads a line of limited size; raises `OSError` where it does not come in time."""
    line = b""
    while b"\n" not in line and len(line) < most:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        received = connection.recv(most - len(line))
        if not received:
            raise ConnectionResetError("worker 0 closed the connection without an answer")
        line += received
    return line


def _lost_error(cluster: Cluster, timeout: float, error: Exception) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"Worker 0 must answer within {timeout:g} s, but it did not.",
        received={"worker 0": cluster.coordinator, "error": str(error) or type(error).__name__},
        hint="Look at worker 0's output, check MASTER_ADDR and MASTER_PORT, or pass a larger `timeout`.",
    )
