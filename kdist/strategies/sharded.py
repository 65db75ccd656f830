"""`ShardedStrategy`, the base class of strategies that shard variables over devices."""

from __future__ import annotations

from collections.abc import Sequence

from kdist import unsupported
from kdist.backends import get_backend
from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.strategies.places import check_options, find_workers, join_workers
from kdist.strategies.strategy import Strategy
from kdist.topology import Mirrored, Sharded


class ShardedStrategy(Strategy):
    """Base class of strategies that shard variables over the devices of all workers.

    Args:
        storage: How variables are sharded; `Mirrored` if they are not.
        devices: Names of the devices of this worker. By default, all accelerators or one CPU.
        cluster_resolver: The resolver of the cluster. By default, kdist reads the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.
    """

    def __init__(
        self,
        storage: Sharded | Mirrored,
        devices: Sequence[str] | None,
        cluster_resolver: ClusterResolver | None,
        communication_options: CommunicationOptions | None,
    ) -> None:
        backend = get_backend()
        unsupported.check(type(self).__name__, backend.name)
        options = check_options(communication_options)
        topology, self._cluster_resolver = find_workers(cluster_resolver, devices, storage)
        names = topology.devices
        if len(names) > 1 and isinstance(storage, Sharded):
            unsupported.check(type(self).__name__, backend.name, "devices", {"devices": names})
        super().__init__(join_workers(topology, options))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the constructor or the environment. Defaults to `TFConfigClusterResolver`."""
        return self._cluster_resolver
