"""Workers: what the runtime of a strategy asks of those that take part, whatever engine joins them."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kdist.backends import mail
from kdist.backends.mail import Mail
from kdist.backends.stalls import Board, StallWatch
from kdist.backends.store import Store
from kdist.cluster import Cluster

_WAITS = "kdist/waits"
# Longer messages travel in pieces: the stores of JAX and TensorFlow hold no value of 2 GiB.
_PIECE = 1 << 26
_MORE, _LAST = b"+", b"."


def folders_of_engine(*files: str) -> tuple[str, ...]:
    """Returns how the paths of code begin that waits for a device or the service, from one file of each folder."""
    return mail.__file__, *(os.path.join(os.path.dirname(file), "") for file in files)


class Workers:
    """This process alone."""

    num_workers = 1
    worker_index = 0
    communication = ""
    """By what the devices of several workers talk."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker, in the order of their indices. Blocks; all must call it."""
        return [data]

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Sends a message to every worker and does not wait; all must call it.

        Returns:
            A function that waits and returns what `all_gather_bytes` would. Call it once, and before the next
            message is begun.
        """
        return lambda: [data]

    def post(self, key: str, text: str) -> None:
        """Leaves a text under a key, once, for any worker to look up at any later time. Does not wait for them."""

    def look_up(self, key: str) -> str | None:
        """Returns the text that any worker has posted under a key, or `None`. Does not wait for it."""
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

    def check_intact(self, finishes: bool = False) -> None:
        """Raises if a worker was lost and what was computed since may be wrong: do not apply or save it.

        Args:
            finishes: Whether to wait first until the device has finished, so that nothing comes after the answer.
        """


class JoinedWorkers(Workers, Board):
    """The workers of a cluster. What each engine does its own way is left to its subclass.

    It has a `mail`, unless the engine's own collectives carry all messages.
    """

    mail: Mail

    def __init__(self, cluster: Cluster, store: Store) -> None:
        self.num_workers = cluster.num_workers
        self.worker_index = cluster.worker_index
        self.names = cluster.worker_names
        self.store = store
        self._stalls = StallWatch(self, self.names, self.worker_index)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers messages of any length, in as many pieces as the longest message needs."""
        messages: list[list[bytes]] = [[] for _ in range(self.num_workers)]
        start, has_more = 0, True
        while has_more:
            end = start + _PIECE
            pieces = self._gather_pieces((_MORE if end < len(data) else _LAST) + data[start:end])
            for message, piece in zip(messages, pieces, strict=True):
                message.append(piece[1:])
            start, has_more = end, any(piece.startswith(_MORE) for piece in pieces)
        return [b"".join(message) for message in messages]

    @abstractmethod
    def _gather_pieces(self, data: bytes) -> list[bytes]:
        """Gathers a message that is not too long for the engine from every worker."""

    def post(self, key: str, text: str) -> None:
        """Leaves a text in the store."""
        self.store.set(key, text.encode())

    def look_up(self, key: str) -> str | None:
        """Returns a text from the store."""
        data = self.store.get(key)
        return None if data is None else data.decode()

    def say(self, text: str | None) -> None:
        """Says in the store where this worker waits for the others; `None` once it goes on."""
        key = f"{_WAITS}/{self.worker_index}"
        if text is None:
            self.store.delete(key)
        else:
            self.store.set(key, text.encode())

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where."""
        others = set(range(self.num_workers)) - {self.worker_index}
        found = {index: self.store.get(f"{_WAITS}/{index}") for index in others}
        return {index: data.decode() for index, data in found.items() if data is not None}

    def limit_time(self, seconds: float | None) -> None:
        """Takes over how long a message may take, from another strategy that shares the connection."""
        self.mail.timeout_seconds = seconds

    def close(self) -> None:
        """Called at the end of the process."""
        self._stalls.close()
