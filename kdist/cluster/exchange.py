"""`complete_addresses`, which exchanges the addresses of all workers if the launcher provides only one.

TensorFlow needs all addresses, but torchrun and MPI provide only worker 0's. Each worker connects to worker
0, sends its address and receives the full list. If there is a secret, both sides prove that they know it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kdist.cluster import handshake, logs
from kdist.cluster.addresses import free_ports, is_loopback, join_address, split_address
from kdist.cluster.discovery import Cluster
from kdist.cluster.environment import TOKEN_VARIABLE
from kdist.cluster.handshake import Link, NotOfThisJobError, secret_error
from kdist.cluster.process_variables import stable_port
from kdist.errors import ClusterConfigError, WorkerTimeoutError, malformed_as

_MOST_CHARACTERS = 512  # per address; a host name has up to 253
_SLACK = 3.0  # seconds that workers wait longer than worker 0, whose error names the missing workers


def complete_addresses(
    cluster: Cluster, timeout: float = 60.0, note: Callable[[Collection[int]], None] = lambda missing: None
) -> tuple[str, ...]:
    """Returns the address of every worker. The workers exchange addresses if only worker 0's is known.

    All workers must call it together. If all addresses are known, it sends nothing. Otherwise, worker 0
    listens at a port next to its own during the exchange. The other workers choose free ports on the network
    interface towards worker 0.

    Args:
        cluster: The cluster, as returned by `discover`.
        timeout: The time to wait for all workers, in seconds.
        note: A callback with the indices of missing workers, called about once per second and before a
            timeout. Worker 0 passes all missing workers. The others pass worker 0 until it responds.

    Returns:
        One address per worker. The list is the same on all workers.

    Raises:
        WorkerTimeoutError: If a worker does not join in time. The message names it.
        ClusterConfigError: If the workers do not belong to the same job, or no port is free.

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
            "The address of worker 0 is unknown.",
            received={"addresses": cluster.addresses},
            hint="Set MASTER_ADDR and MASTER_PORT to the host and port of worker 0.",
        )
    deadline = time.monotonic() + timeout
    if cluster.worker_index == 0:
        return _gather(cluster, timeout, deadline, note)
    return _report(cluster, timeout, deadline + _SLACK, note)


def _meeting_places(cluster: Cluster) -> list[tuple[str, int]]:
    """Returns the addresses at which worker 0 tries to listen, in order.

    torchrun's agent may use the port itself, so the first ones are next to it. Outgoing connections may take
    these at any time, so the other ones are below the range for outgoing connections.
    """
    host, port = split_address(cluster.coordinator)
    beside = [port + step if port + step <= 65535 else port - step for step in (1, 2)]
    derived = [stable_port([str(cluster.coordinator), str(number)]) + 1 for number in range(4)]
    return [(host, place) for place in dict.fromkeys([*beside, *derived]) if place != port]


def _purpose(cluster: Cluster) -> str:
    """Names the connection, so that a worker cannot join worker 0 of another job of the same user."""
    return f"addresses of {cluster.coordinator}"


def _own_address(cluster: Cluster, host: str) -> str:
    known = cluster.addresses[cluster.worker_index]
    if known and not (cluster.worker_index == 0 and cluster.coordinator_taken):
        return known
    return join_address(host, free_ports(1, "127.0.0.1" if is_loopback(host) else "")[0])


def _gather(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> tuple[str, ...]:
    """Runs on worker 0: waits for the other workers, then sends the list to all of them."""
    addresses: dict[int, str] = {0: _own_address(cluster, split_address(cluster.coordinator)[0])}
    joined: list[Link] = []
    secret = handshake.secret_if_any(str(cluster.coordinator), warn=True)
    with contextlib.ExitStack() as cleanup:
        server = cleanup.enter_context(_listen(cluster))
        clients = handshake.clients(server, secret, _purpose(cluster), deadline)
        for client in cleanup.enter_context(contextlib.closing(clients)):
            if client is None:
                note(_missing(cluster, addresses))
                continue
            link, said = client
            cleanup.enter_context(link.connection)
            problem = _admit(said, cluster, addresses)
            if problem is None:
                joined.append(link)
            elif secret:
                _tell([*joined, link], {"problem": problem})
                raise _mismatch_error(problem)
            else:  # with an error, anybody could stop the job
                _tell([link], {"problem": problem})
                logs.logger.warning("Ignored a worker from %s: %s", link.host, _mismatch_error(problem))
            if len(addresses) == cluster.num_workers:
                break
        else:
            missing = _missing(cluster, addresses)
            note(missing)
            _tell(joined, {"missing": missing, "timeout": timeout})
            raise _missing_error(missing, timeout)
        complete = tuple(addresses[index] for index in range(cluster.num_workers))
        _tell(joined, {"addresses": complete})
        return complete


def _missing(cluster: Cluster, addresses: Mapping[int, str]) -> list[int]:
    return [index for index in range(cluster.num_workers) if index not in addresses]


def _listen(cluster: Cluster) -> socket.socket:
    refused: dict[str, str] = {}
    for host, port in _meeting_places(cluster):
        # With several machines, the name of worker 0 may resolve to a loopback address on its own machine.
        where = host if is_loopback(host) else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((where, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            refused[join_address(host, port)] = os.strerror(error.errno or 0)
    raise ClusterConfigError(
        "Worker 0 cannot listen on any of the ports on which the workers exchange their addresses.",
        received=refused,
        hint="Choose another MASTER_PORT.",
    )


def _admit(said: Mapping[str, Any], cluster: Cluster, addresses: dict[int, str]) -> dict[str, Any] | None:
    """Stores the address of a worker, or returns the mismatch if it does not belong to this job."""
    index, count, address = (said.get(name) for name in ("worker", "num_workers", "address"))
    agrees = count == cluster.num_workers
    if agrees and type(index) is int and 0 < index < cluster.num_workers and index not in addresses:
        with contextlib.suppress(ClusterConfigError):
            split_address(address)
            if len(str(address)) <= _MOST_CHARACTERS:
                addresses[index] = str(address)
                return None
    return {"expected num_workers": cluster.num_workers, "num_workers": count, "worker": index}


def _mismatch_error(problem: dict[str, Any]) -> ClusterConfigError:
    return ClusterConfigError(
        "A worker was started with a different number of workers, or its index is invalid or already in use.",
        received=problem,
        hint="Start all workers with the same launcher, or check RANK and WORLD_SIZE.",
    )


def _missing_error(missing: Sequence[int], timeout: float) -> WorkerTimeoutError:
    names = ", ".join(f"worker {index}" for index in missing)
    return WorkerTimeoutError(
        f"Some workers did not join within {timeout:g} s: {names}.",
        hint="Read the output of the missing workers, or pass a larger `timeout`.",
    )


def _tell(links: Sequence[Link], message: Mapping[str, Any]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.send(message)


def _report(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> tuple[str, ...]:
    """Runs on the other workers: sends the worker's address to worker 0 and receives the list."""
    note([0])
    link = _connect(cluster, timeout, deadline, note)
    with link.connection:
        own = _own_address(cluster, link.connection.getsockname()[0])
        try:
            link.send({"worker": cluster.worker_index, "num_workers": cluster.num_workers, "address": own})
            reply = link.receive(deadline, 1024 * (cluster.num_workers + 4))
        except OSError as error:
            raise _lost_error(cluster, timeout, error) from error
    with malformed_as(lambda why: _lost_error(cluster, timeout, ValueError(why))):
        if "missing" in reply:
            missing = [index for index in range(cluster.num_workers) if index in reply["missing"]]
            note(missing)
            raise _missing_error(missing, timeout)
        if "problem" in reply:
            raise _mismatch_error(dict(reply["problem"]))
        addresses = tuple(reply["addresses"])
        for address in addresses:
            split_address(address)
    return addresses


def _connect(
    cluster: Cluster, timeout: float, deadline: float, note: Callable[[Collection[int]], None]
) -> Link:
    secret = handshake.secret_if_any(str(cluster.coordinator))
    problem: Exception = TimeoutError()
    stranger: NotOfThisJobError | None = None
    while time.monotonic() < deadline - _SLACK:
        for place in _meeting_places(cluster):
            patience = min(5.0, max(0.1, deadline - time.monotonic()))
            try:
                return handshake.connect(place, secret, _purpose(cluster), patience, min(1.0, patience))
            except NotOfThisJobError as error:
                if stranger is None:
                    logs.logger.warning(
                        "The process at %s does not belong to this job: %s. Trying again. Set the same %s for all "
                        "workers, or choose another MASTER_PORT.",
                        join_address(*place),
                        error,
                        TOKEN_VARIABLE,
                    )
                problem = stranger = error
            except OSError as error:  # worker 0 may still be importing its framework
                problem = error
        note([0])
        # Keeps thousands of workers from retrying at the same time.
        time.sleep(random.uniform(0.5, 1.5) * min(2.0, 0.1 + cluster.num_workers / 1000))
    if stranger is not None:
        raise secret_error(str(cluster.coordinator), stranger) from stranger
    raise _lost_error(cluster, timeout, problem) from problem


def _lost_error(cluster: Cluster, timeout: float, error: Exception) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"Worker 0 did not respond within {timeout:g} s.",
        received={"worker 0": cluster.coordinator, "error": str(error) or type(error).__name__},
        hint="Read the output of worker 0, check MASTER_ADDR and MASTER_PORT, or pass a larger `timeout`.",
    )
