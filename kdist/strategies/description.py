"""The description of a strategy: its `repr`, and the log line after it is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kdist.backends import get_backend
from kdist.cluster import logs
from kdist.cluster.roles import listed, number_of

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime
    from kdist.topology import Topology


# The first announced plan. Later strategies of the same job would only repeat it.
_announced: list[str] = []


@dataclass(frozen=True)
class Description:
    """Details of a strategy that its runtime does not have.

    Args:
        namespace: The public module of the class.
        tasks: Descriptions of the tasks, if they have different roles.
        source: The source of the cluster, for example "TF_CONFIG".
    """

    namespace: str = "kdist"
    tasks: Sequence[str] = ()
    source: str = ""


class Described(Protocol):
    """The parts of a strategy that its description contains."""

    _told: Description

    @property
    def runtime(self) -> Runtime:
        """The `Runtime` of the strategy."""


def describe(strategy: Described) -> str:
    """Returns the `repr` of a strategy, even if its constructor has not finished."""
    kind = type(strategy)
    name = (
        f"{strategy._told.namespace}.{kind.__name__}"
        if kind.__module__.startswith("kdist.")
        else kind.__name__
    )
    runtime: Runtime | None = getattr(strategy, "_runtime", None)
    if runtime is None:
        return f"<{name}: not created yet>"
    worker = f"worker {runtime.worker_index} of {runtime.num_workers}"
    parts = strategy._told.tasks or [
        *([worker] if runtime.num_workers > 1 else []),
        _devices(runtime),
        *_storage(runtime.topology, runtime.num_replicas),
    ]
    if runtime.communication:
        parts = [*parts, runtime.communication]
    return f"<{name} on {get_backend().name}: {', '.join(parts)}>"


def announce(strategy: Described) -> None:
    """Logs the plan of a new strategy. If there are several tasks, the chief shows it once by default."""
    runtime, several = strategy.runtime, bool(strategy._told.tasks) or strategy.runtime.num_workers > 1
    line = plan(strategy)
    if runtime.worker_index:
        logs.logger.debug("%r", strategy)
    elif several and not _announced:
        _announced.append(line)
        logs.notice("%s", line)
    else:
        logs.logger.info("%s", line)


def plan(strategy: Described) -> str:
    """Returns the strategy, backend, tasks with devices, and source of the cluster.

    For example: "MultiWorkerMirrored on torch/gloo, 2 workers × 1 cpu, from TF_CONFIG".
    """
    runtime = strategy.runtime
    engine = "/".join(filter(None, [get_backend().name, runtime.communication]))
    workers = number_of("worker", runtime.num_workers)
    each = f"{len(runtime.devices)} {runtime.devices[0].partition(':')[0]}"
    who = strategy._told.tasks or [f"{workers} × {each}"]
    cluster = runtime.topology.cluster
    source = strategy._told.source or (cluster.source if cluster is not None else "")
    name = type(strategy).__name__.removesuffix("Strategy")
    return ", ".join([f"{name} on {engine}", *who, *([f"from {source}"] if source else [])])


def _devices(runtime: Runtime) -> str:
    number = len(runtime.devices)
    return f"{number} device{'s' * (number > 1)} ({listed(runtime.devices)})"


def _storage(topology: Topology, num_devices: int) -> list[str]:
    if topology.is_central:
        return [f"variables on {topology.parameter_devices[0]}"]
    if topology.sharded is not None:
        lengths = topology.sharded.lengths(num_devices).items()
        return ["mesh " + " × ".join(f"{axis}={length}" for axis, length in lengths)]
    return []
