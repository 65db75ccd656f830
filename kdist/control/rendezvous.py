"""The rendezvous: each worker connects to the chief, sends its address and receives the addresses of all workers.

TensorFlow needs all addresses, but torchrun and MPI provide only worker 0's. If there is a secret, both sides
prove that they know it. The connections stay open for messages; see `Channel`.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kdist.cluster import handshake, logs
from kdist.cluster.addresses import check_port_free, free_ports, is_loopback, join_address, split_address
from kdist.cluster.discovery import Cluster
from kdist.cluster.environment import TOKEN_VARIABLE
from kdist.cluster.handshake import Link, NotOfThisJobError, SilentServerError, secret_error
from kdist.cluster.process_variables import stable_port
from kdist.control.channel import Channel
from kdist.control.waiting import Waiting
from kdist.errors import ClusterConfigError, WorkerTimeoutError, malformed_as

_MOST_CHARACTERS = 512  # per address; a host name has up to 253
# Seconds without an answer of kdist at an open port of worker 0. A worker 0 of an earlier attempt may still listen.
_FOREIGN_SECONDS = 20.0
_SLACK = 3.0  # seconds that workers wait longer than worker 0, whose error names the missing workers


def connect_workers(
    cluster: Cluster, chief_address: str | None, timeout: float, timeout_seconds: float | None = None
) -> tuple[tuple[str, ...], Channel]:
    """Waits until all workers have joined, and connects each of them to the chief.

    All workers must call it together.

    Args:
        cluster: The cluster, as returned by `discover`, with at least two workers.
        chief_address: The address at which the backend of the chief listens afterwards. Workers connect there, so
            that a firewall needs no other open port. With `None`, the chief listens at a port next to its own.
        timeout: The time to wait for all workers, in seconds.
        timeout_seconds: The timeout of later messages; see `Channel`.

    Returns:
        An address of each worker for data, and the connections. Addresses of the cluster are used only without a
        `chief_address`; otherwise, a worker chooses a free port of the network interface towards worker 0.

    Raises:
        WorkerTimeoutError: If a worker does not join in time. The error names the missing workers.
        ClusterConfigError: If the workers do not belong to the same job, or no port is free.
    """
    if cluster.coordinator is None:
        raise ClusterConfigError(
            "The address of worker 0 is unknown.",
            received={"addresses": cluster.addresses},
            hint="Set MASTER_ADDR and MASTER_PORT to the host and port of worker 0.",
        )
    places = _places(cluster, chief_address)
    if chief_address is not None and cluster.is_chief:
        host, port = places[0]
        check_port_free(join_address(host if is_loopback(host) else "0.0.0.0", port))
    _allow_files(cluster.num_workers)
    waiting = Waiting(cluster.worker_names, timeout)
    deadline = time.monotonic() + timeout
    join = _gather if cluster.is_chief else _report
    addresses, sockets = join(cluster, places, waiting, deadline, chief_address is None)
    try:
        channel = Channel(cluster.worker_names, cluster.worker_index, sockets, timeout_seconds)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    return addresses, channel


def _allow_files(count: int) -> None:
    """Raises the limit of open files, if necessary, for the connections of the chief and of its framework."""
    needed = 4 * count + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _places(cluster: Cluster, chief_address: str | None) -> list[tuple[str, int]]:
    """Returns the addresses at which worker 0 tries to listen, in order.

    torchrun's agent may use the port itself, so the first ones are next to it. Outgoing connections may take
    these at any time, so the other ones are below the range for outgoing connections.
    """
    host, port = split_address(cluster.coordinator)
    beside = [port + step if port + step <= 65535 else port - step for step in (1, 2)]
    derived = [stable_port([str(cluster.coordinator), str(number)]) + 1 for number in range(4)]
    first = [] if chief_address is None else [split_address(chief_address)]
    found = [*first, *((host, place) for place in [*beside, *derived] if place != port)]
    return list(dict.fromkeys(found))


def _purpose(cluster: Cluster) -> str:
    """Names the connection, so that a worker cannot join worker 0 of another job of the same user."""
    return f"addresses of {cluster.coordinator}"


def _own_address(cluster: Cluster, host: str, is_beside: bool) -> str:
    known = cluster.addresses[cluster.worker_index]
    if is_beside and known and not (cluster.worker_index == 0 and cluster.coordinator_taken):
        return known
    # The workers of a machine choose at the same time, and the chief may not use its port yet. So workers choose
    # ports with different remainders, as far as possible.
    _, of_chief = split_address(cluster.coordinator)
    for _ in range(min(16 * cluster.num_workers, 200)):
        (port,) = free_ports(1, "127.0.0.1" if is_loopback(host) else "")
        if port != of_chief and port % cluster.num_workers == cluster.worker_index:
            break
    return join_address(host, port)


def _gather(
    cluster: Cluster, places: Sequence[tuple[str, int]], waiting: Waiting, deadline: float, is_beside: bool
) -> tuple[tuple[str, ...], dict[int, socket.socket]]:
    """Runs on worker 0: waits for the other workers, then sends the list of addresses to all of them."""
    addresses: dict[int, str] = {0: _own_address(cluster, split_address(cluster.coordinator)[0], is_beside)}
    joined: dict[int, Link] = {}
    secret = handshake.secret_if_any(str(cluster.coordinator), warn=True)
    with contextlib.ExitStack() as cleanup, _listen(places) as server:
        clients = handshake.clients(server, secret, _purpose(cluster), deadline)
        for client in cleanup.enter_context(contextlib.closing(clients)):
            if client is None:
                waiting.note(_missing(cluster, addresses))
                continue
            link, said = client
            cleanup.enter_context(link.connection)
            problem = _admit(said, cluster, addresses)
            if problem is None:
                joined[said["worker"]] = link
            elif secret:
                _tell([*joined.values(), link], {"problem": problem})
                raise _mismatch_error(problem)
            else:  # with an error, anybody could stop the job
                _tell([link], {"problem": problem})
                link.connection.close()
                logs.logger.warning("Ignored a worker from %s: %s", link.host, _mismatch_error(problem))
            if len(addresses) == cluster.num_workers:
                break
        else:
            missing = _missing(cluster, addresses)
            waiting.note(missing)
            _tell(joined.values(), {"missing": missing})
            raise missing_error(cluster, waiting.timeout, missing)
        server.close()  # before the others continue: the backend may listen here next
        complete = tuple(addresses[index] for index in range(cluster.num_workers))
        _tell(joined.values(), {"addresses": complete})
        cleanup.pop_all()
        return complete, {index: link.connection for index, link in joined.items()}


def _missing(cluster: Cluster, addresses: Mapping[int, str]) -> list[int]:
    return [index for index in range(cluster.num_workers) if index not in addresses]


def _listen(places: Sequence[tuple[str, int]]) -> socket.socket:
    refused: dict[str, str] = {}
    for host, port in places:
        try:
            return listen(host, port)
        except OSError as error:
            refused[join_address(host, port)] = os.strerror(error.errno or 0)
    raise ClusterConfigError(
        "Worker 0 cannot listen on any of the ports on which the workers join.",
        received=refused,
        hint="Choose another MASTER_PORT.",
    )


def listen(host: str, port: int) -> socket.socket:
    """Listens on the loopback interface if the job uses one machine, otherwise on all interfaces.

    With several machines, the name of worker 0 may resolve to a loopback address on its own machine.
    """
    where = host if is_loopback(host) else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((where, port), family=family, backlog=socket.SOMAXCONN)


def _admit(said: Mapping[str, Any], cluster: Cluster, addresses: dict[int, str]) -> dict[str, Any] | None:
    """Stores the address of a worker, or returns the mismatch if it does not belong to this job."""
    index, count, address = (said.get(name) for name in ("worker", "num_workers", "address"))
    is_valid = count == cluster.num_workers and type(index) is int and 0 < index < cluster.num_workers
    if is_valid and index in addresses:
        return {"worker": index}
    if is_valid and index is not None:
        with contextlib.suppress(ClusterConfigError):
            split_address(address)
            if len(str(address)) <= _MOST_CHARACTERS:
                addresses[index] = str(address)
                return None
    return {"expected num_workers": cluster.num_workers, "num_workers": count, "worker": index}


def _mismatch_error(problem: dict[str, Any]) -> ClusterConfigError:
    if "num_workers" not in problem:
        return ClusterConfigError(
            "Two processes have the same worker index.",
            received=problem,
            hint="Set a different index for each process: task.index in TF_CONFIG, or RANK.",
        )
    return ClusterConfigError(
        "A worker was started with a different number of workers, or its index is invalid.",
        received=problem,
        hint="Start all workers with the same launcher, or check RANK and WORLD_SIZE.",
    )


def _tell(links: Iterable[Link], message: Mapping[str, Any]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.send(message)


def _report(
    cluster: Cluster, places: Sequence[tuple[str, int]], waiting: Waiting, deadline: float, is_beside: bool
) -> tuple[tuple[str, ...], dict[int, socket.socket]]:
    """Runs on the other workers: sends the worker's address to worker 0 and receives the list."""
    waiting.note([0])
    deadline += _SLACK
    link = _connect(cluster, places, waiting, deadline, is_beside)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(link.connection)
        own = _own_address(cluster, link.connection.getsockname()[0], is_beside)
        try:
            link.send({"worker": cluster.worker_index, "num_workers": cluster.num_workers, "address": own})
            reply = link.receive(deadline, 1024 * (cluster.num_workers + 4))
        except OSError as error:
            raise missing_error(cluster, waiting.timeout, [0]) from error
        with malformed_as(lambda why: missing_error(cluster, waiting.timeout, [0])):
            if "missing" in reply:
                missing = [index for index in range(cluster.num_workers) if index in reply["missing"]]
                waiting.note(missing)
                raise missing_error(cluster, waiting.timeout, missing)
            if "problem" in reply:
                raise _mismatch_error(dict(reply["problem"]))
            addresses = tuple(reply["addresses"])
            for address in addresses:
                split_address(address)
        cleanup.pop_all()
        return addresses, {0: link.connection}


def _foreign_error(cluster: Cluster, error: Exception) -> ClusterConfigError:
    return ClusterConfigError(
        "The program at the address of worker 0 does not belong to this job.",
        received={"address": cluster.coordinator, "error": str(error)[:200]},
        hint="Choose another port, or terminate that program.",
    )


def _connect(
    cluster: Cluster,
    places: Sequence[tuple[str, int]],
    waiting: Waiting,
    deadline: float,
    is_beside: bool,
) -> Link:
    """Connects to worker 0, which listens at the first of the places, unless this is beside its own port."""
    secret = handshake.secret_if_any(str(cluster.coordinator))
    problem: Exception = TimeoutError()
    stranger: NotOfThisJobError | None = None
    foreign: tuple[float, Exception] | None = None
    while time.monotonic() < deadline - _SLACK:
        for place in places:
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
                if not is_beside and place == places[0]:
                    is_foreign = isinstance(error, (SilentServerError, ConnectionAbortedError))
                    since = time.monotonic() if foreign is None else foreign[0]
                    foreign = (since, error) if is_foreign else None
        if foreign is not None and time.monotonic() - foreign[0] > _FOREIGN_SECONDS:
            raise _foreign_error(cluster, foreign[1]) from foreign[1]
        waiting.note([0])
        # Keeps thousands of workers from retrying at the same time.
        time.sleep(random.uniform(0.5, 1.5) * min(2.0, 0.1 + cluster.num_workers / 1000))
    if stranger is not None:
        raise secret_error(str(cluster.coordinator), stranger) from stranger
    raise missing_error(cluster, waiting.timeout, [0]) from problem


def missing_error(cluster: Cluster, timeout: float, missing: Collection[int]) -> WorkerTimeoutError:
    """Returns the error for a rendezvous that timed out. `missing` are the known missing workers."""
    names = cluster.worker_names
    named = [names[index] for index in sorted(missing) if index < len(names)]
    received = {"this_worker": names[cluster.worker_index]}
    if unknown := _unknown_hosts(cluster, missing):
        received["unknown_hosts"] = ", ".join(unknown)
    return WorkerTimeoutError(
        f"{len(named) or 'Some'} of {len(names)} workers did not join within {timeout:g} s"
        + (f": {', '.join(named)}." if named else "."),
        received=received,
        hint=f"Check the name on this machine:\ngetent hosts {unknown[0]}"
        if unknown
        else "Start the missing workers, or wait longer: export KDIST_JOIN_TIMEOUT=600\n"
        "To find the cause, run: kdist doctor",
    )


def _unknown_hosts(cluster: Cluster, missing: Collection[int]) -> list[str]:
    """Returns the host names of missing workers that this machine cannot resolve."""
    known = [address for index, address in enumerate(cluster.addresses) if index in missing and address]
    found = []
    for host in dict.fromkeys(split_address(address)[0] for address in known):
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            found.append(host)
    return found
