"""Joining: what the backends share of waiting until all workers of a cluster are there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from kdist.cluster import check_port_free, complete_addresses, is_loopback, join_address, split_address
from kdist.errors import WorkerTimeoutError

if TYPE_CHECKING:
    from kdist.cluster import Cluster


def wait_for_all(cluster: Cluster, chief_address: str | None, timeout: float) -> tuple[str, ...]:
    """Waits until all workers are there; returns their addresses.

    Args:
        cluster: Who takes part.
        chief_address: Where the engine will listen, at the chief; `None` if that is not known yet.
        timeout: How many seconds to wait.

    Raises:
        WorkerTimeoutError: Not all have come in time; names the missing.
        ClusterConfigError: The port of the chief is in use.
    """
    try:
        if chief_address is None:
            return complete_addresses(cluster, timeout)
        host, port = split_address(chief_address)
        if cluster.is_chief:
            check_port_free(join_address(host if is_loopback(host) else "0.0.0.0", port))
        # The exchange meets at the port after the one it is given; the engine takes the same port next.
        unknown = dataclasses.replace(
            cluster, addresses=(None,) * cluster.num_workers, coordinator=join_address(host, port - 1)
        )
        return complete_addresses(unknown, timeout)
    except WorkerTimeoutError as error:
        missing = {int(number) for number in re.findall(r"worker (\d+)", error.rule, re.IGNORECASE)}
        raise missing_error(cluster, timeout, missing) from error


def missing_error(cluster: Cluster, timeout: float, missing: Collection[int]) -> WorkerTimeoutError:
    """Returns the error of a worker that has waited for others in vain.

    Args:
        cluster: Who takes part.
        timeout: How many seconds it has waited.
        missing: The indices of those who did not come, where known.
    """
    names = cluster.worker_names
    named = ", ".join(names[index] for index in sorted(missing) if index < len(names)) or "some worker"
    return WorkerTimeoutError(
        f"All {len(names)} workers must come within {timeout:g} s, but {named} did not.",
        received={"this_worker": names[cluster.worker_index]},
        hint="Start the missing workers, or wait longer: export KDIST_JOIN_TIMEOUT=600",
    )
