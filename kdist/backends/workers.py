"""Workers: what the runtime of a strategy asks of those that take part, whatever engine joins them."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kdist.backends.stalls import Board, StallWatch
from kdist.backends.store import Store
from kdist.cluster import Cluster

_WAITS = "kdist/waits"


class Workers:
    """This process alone."""

    num_workers = 1
    worker_index = 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker; see `Runtime.all_gather_bytes`."""
        return [data]

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Starts to gather a message from every worker; see `Runtime.begin_gather_bytes`."""
        return lambda: [data]

    def post(self, key: str, text: str) -> None:
        """Leaves a text for the other workers."""

    def look_up(self, key: str) -> str | None:
        """Returns the text that a worker has left under a key."""
        return None

    def lost(self) -> frozenset[int]:
        """Returns the workers that the engine knows to be lost. Does not wait; for any thread."""
        return frozenset()

    def working(self) -> AbstractContextManager[Any]:
        """Entered for as long as this worker cannot go on without the others."""
        return contextlib.nullcontext()

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names the worker that was lost, where `error` comes from that."""
        return error


class JoinedWorkers(Workers, Board):
    """The workers of a cluster. What each engine does its own way is left to its subclass.

    Args:
        cluster: Who takes part.
        store: The engine's.
    """

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self.num_workers = cluster.num_workers
        self.worker_index = cluster.worker_index
        self.names = cluster.worker_names
        self._store = store
        self._stalls = StallWatch(self, self.names, self.worker_index)

    def post(self, key: str, text: str) -> None:
        """Leaves a text in the store."""
        self._store.set(key, text.encode())

    def look_up(self, key: str) -> str | None:
        """Returns a text from the store."""
        data = self._store.get(key)
        return None if data is None else data.decode()

    def say(self, text: str | None) -> None:
        """Says in the store where this worker waits for the others; `None` once it goes on."""
        key = f"{_WAITS}/{self.worker_index}"
        if text is None:
            self._store.delete(key)
        else:
            self._store.set(key, text.encode())

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where."""
        others = set(range(self.num_workers)) - {self.worker_index}
        found = {index: self._store.get(f"{_WAITS}/{index}") for index in others}
        return {index: data.decode() for index, data in found.items() if data is not None}

    @abstractmethod
    def limit_time(self, seconds: float | None) -> None:
        """Takes over how long a message may take, from another strategy that shares the connection."""

    def close(self) -> None:
        """Called at the end of the process."""
        self._stalls.close()
