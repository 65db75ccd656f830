"""The workers of the toy backend, which sends arrays as messages because it has no collectives."""

from __future__ import annotations

from kdist.backends import workers
from kdist.cluster import Cluster
from kdist.control.channel import Channel
from kdist.control.joining import OpenChannel, join_once

_ENGINE = workers.folders_of_engine(__file__)


class ToyWorkers(workers.JoinedWorkers):
    """The workers of a cluster."""

    communication = "tcp"

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        super().__init__(cluster, channel)
        self._stalls.start()

    def waits_in(self, filename: str) -> bool:
        """Returns whether the main thread waits for messages."""
        return filename.startswith(_ENGINE)


def join(cluster: Cluster, timeout_seconds: float | None) -> ToyWorkers:
    """Waits until all workers have joined."""

    def connect(open_channel: OpenChannel, timeout: float) -> ToyWorkers:
        return ToyWorkers(cluster, open_channel(cluster.coordinator)[1])

    return join_once(cluster, timeout_seconds, connect)
