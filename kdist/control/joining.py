"""Joins the workers of a cluster, once per process, and waits until all workers have joined."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kdist.cluster import Cluster, logs, timeouts
from kdist.cluster.roles import listed
from kdist.control import loss_reasons
from kdist.control.channel import Channel
from kdist.control.rendezvous import connect_workers
from kdist.errors import ClusterConfigError, StrategyScopeError, WorkerMismatchError


class Joined(Protocol):
    """The workers of a cluster, as a backend returns them."""

    def limit_time(self, seconds: float | None) -> None:
        """Sets the timeout of messages."""

    def close(self) -> None:
        """Ends the connections when the process exits."""


JoinedT = TypeVar("JoinedT", bound=Joined)
OpenChannel = Callable[[str | None], tuple[tuple[str, ...], Channel]]
"""Connects to the other workers, given the address at which the backend of the chief listens; `connect_workers`."""

_joined: tuple[Cluster, Any] | None = None


def join_once(
    cluster: Cluster, timeout_seconds: float | None, connect: Callable[[OpenChannel, float], JoinedT]
) -> JoinedT:
    """Joins the workers of a cluster with `connect`, which gets `OpenChannel` and the timeout in seconds.

    Another strategy with the same cluster shares the connection, and sets the `timeout_seconds` of messages.

    Raises:
        StrategyScopeError: If this process has joined another cluster.
        InvalidArgumentError: If `KDIST_JOIN_TIMEOUT` is not a number of at least 1.
    """
    global _joined
    if _joined is None:
        began, timeout = time.monotonic(), timeouts.join_timeout()
        logs.logger.debug("joining %s (timeout: %g s)", listed(cluster.worker_names), timeout)
        with contextlib.ExitStack() as cleanup:

            def open_channel(chief_address: str | None) -> tuple[tuple[str, ...], Channel]:
                addresses, channel = connect_workers(cluster, chief_address, timeout, timeout_seconds)
                cleanup.push(functools.partial(_close, channel))
                return addresses, channel

            joined = connect(open_channel, timeout)
            cleanup.pop_all()
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
    shared: JoinedT = workers
    return shared


def _close(channel: Channel, kind: object, error: BaseException | None, trace: object) -> None:
    channel.close(loss_reasons.of_error(error) if error is not None else None)


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
