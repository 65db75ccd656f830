"""Joins the workers of a cluster, once per process, and waits until all workers have joined."""

from __future__ import annotations

import atexit
import dataclasses
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from kdist.backends.waiting import Waiting
from kdist.backends.workers import JoinedWorkers
from kdist.cluster import (
    Cluster,
    check_port_free,
    complete_addresses,
    is_loopback,
    join_address,
    liveness,
    logs,
    split_address,
)
from kdist.cluster.roles import listed
from kdist.errors import ClusterConfigError, StrategyScopeError, WorkerMismatchError, WorkerTimeoutError

Joined = TypeVar("Joined", bound=JoinedWorkers)

_joined: tuple[Cluster, Any] | None = None


def join_once(cluster: Cluster, timeout_seconds: float | None, connect: Callable[[float], Joined]) -> Joined:
    """Joins the workers of a cluster with `connect`, which receives the timeout in seconds.

    Another strategy with the same cluster shares the connection, and sets the `timeout_seconds` of messages.

    Raises:
        StrategyScopeError: If this process has joined another cluster.
        InvalidArgumentError: If `KDIST_JOIN_TIMEOUT` is not a number of at least 1.
    """
    global _joined
    if _joined is None:
        began, timeout = time.monotonic(), liveness.join_timeout()
        logs.logger.debug("joining %s (timeout: %g s)", listed(cluster.worker_names), timeout)
        joined = connect(timeout)
        logs.logger.debug("joined after %.1f s", time.monotonic() - began)
        atexit.register(joined.close)
        _joined = cluster, joined
        return joined
    before, workers = _joined
    facts = ("num_workers", "worker_index", "coordinator", "addresses")
    if any(getattr(before, fact) != getattr(cluster, fact) for fact in facts):
        raise StrategyScopeError(
            "This process has already joined another cluster.",
            received={"joined": before.worker_names, "wanted": cluster.worker_names},
            hint="Use one cluster per process. Several strategies can share it.",
        )
    workers.limit_time(timeout_seconds)
    return workers


def wait_for_all(cluster: Cluster, chief_address: str | None, timeout: float) -> tuple[str, ...]:
    """Waits until all workers have joined, and returns their addresses.

    The backend will listen at `chief_address`, which can be `None` if it is not known yet.

    Raises:
        WorkerTimeoutError: If workers do not join in time. The error names the missing workers.
        ClusterConfigError: If the port of the chief is in use.
    """
    waiting = Waiting(cluster.worker_names, timeout)
    try:
        if chief_address is None:
            return complete_addresses(cluster, timeout, waiting.note)
        host, port = split_address(chief_address)
        if cluster.is_chief:
            check_port_free(join_address(host if is_loopback(host) else "0.0.0.0", port))
        # The exchange uses the port after the given one: the port that the backend uses next.
        unknown = dataclasses.replace(
            cluster, addresses=(None,) * cluster.num_workers, coordinator=join_address(host, port - 1)
        )
        return complete_addresses(unknown, timeout, waiting.note)
    except WorkerTimeoutError as error:
        raise missing_error(cluster, timeout, waiting.missing) from error


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


def closed_error(this_worker: str, error: BaseException) -> ClusterConfigError:
    """Returns the error of a worker that joined, but cannot reach another worker's data port."""
    return ClusterConfigError(
        "The workers found each other, but this worker could not open a data connection to another one.",
        received={"this_worker": this_worker, "error": str(error)[:200]},
        hint="Open all ports above 1024 between the hosts, or set the network interface that reaches them: "
        "export GLOO_SOCKET_IFNAME=eth0",
    )


def check_devices(names: Sequence[str], devices: Sequence[tuple[str, int]]) -> None:
    """Raises an error unless all workers have the same kind and number of devices."""
    for name, theirs in zip(names, devices, strict=True):
        if theirs != devices[0]:
            raise WorkerMismatchError(
                "Workers have different devices.",
                received={
                    who: f"{count} {kind}" for who, (kind, count) in ((names[0], devices[0]), (name, theirs))
                },
                hint="Pass `devices` to the strategy: the same kind and number on each worker.",
            )
