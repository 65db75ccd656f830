"""The workers of a strategy, as the runtime uses them on all backends."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kdist import communication
from kdist.backends import mail
from kdist.backends.mail import Mail
from kdist.backends.stalls import Board, StallWatch
from kdist.backends.store import Store
from kdist.cluster import Cluster, liveness

if TYPE_CHECKING:
    from kdist.arrays.types import T
    from kdist.communication.shared_memory import SharedMemory

_WAITS = "kdist/waits"
# Longer messages are sent in pieces, because the stores of JAX and TensorFlow cannot hold a value of 2 GiB.
_PIECE = 1 << 26
_MORE, _LAST = b"+", b"."


def folders_of_engine(*files: str) -> tuple[str, ...]:
    """Returns path prefixes of code that waits for devices or the store, given a file per directory."""
    files = communication.__file__, *files  # sums in shared memory
    return mail.__file__, *(os.path.join(os.path.dirname(file), "") for file in files)


class Workers:
    """A single process without other workers."""

    num_workers = 1
    worker_index = 0
    communication = ""
    """The library that connects the devices of several workers, for example "nccl"."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker, in the order of their indices. Blocks. All must call it."""
        return [data]

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Sends a message to every worker and does not wait. All must call it.

        Returns:
            A function that waits and returns the messages. Call it once, before the next message begins.
        """
        return lambda: [data]

    def post(self, key: str, text: str) -> None:
        """Posts a text under a new key, so that any worker can look it up later. Does not wait."""

    def look_up(self, key: str) -> str | None:
        """Returns the text that a worker has posted under a key, or `None`. Does not wait."""
        return None

    def lost(self) -> frozenset[int]:
        """Returns the workers that the backend has reported as lost. Does not wait, and is thread-safe."""
        return frozenset()

    def working(self) -> AbstractContextManager[object]:
        """A context manager for code in which this worker cannot continue without the others."""
        return contextlib.nullcontext()

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names the lost worker if this is the cause of `error`; otherwise `error`."""
        return error

    def check_intact(self, finishes: bool = False) -> None:
        """Raises an error if a worker was lost. Do not apply or save results then; they may be wrong.

        Args:
            finishes: Whether to wait for the device first, so that the check covers all pending work.
        """


class JoinedWorkers(Workers, Board):
    """The base class for the workers of a cluster. Each backend has a subclass.

    It has a `mail`, unless the backend sends all messages with collectives.
    """

    mail: Mail
    memory: SharedMemory | None = None
    """The shared memory of the workers, if all of them are on one machine and have one CPU device."""

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

    def _gather_pieces(self, data: bytes) -> list[bytes]:
        """Gathers a message that does not exceed the backend's limit from every worker."""
        return self.begin_gather_bytes(data)()

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Gathers messages in a background thread, without a collective, which would wait for running steps."""
        return self.mail.begin(data)

    def post(self, key: str, text: str) -> None:
        """Writes a text into the store."""
        self.store.set(key, text.encode())

    def look_up(self, key: str) -> str | None:
        """Returns a text from the store."""
        data = self.store.get(key)
        return None if data is None else data.decode()

    def say(self, text: str | None) -> None:
        """Publishes where this worker waits for the others; `None` when it continues."""
        key = f"{_WAITS}/{self.worker_index}"
        if text is None:
            self.store.delete(key)
        else:
            self.store.set(key, text.encode())

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where each one waits."""
        others = set(range(self.num_workers)) - {self.worker_index}
        found = {index: self.store.get(f"{_WAITS}/{index}") for index in others}
        return {index: data.decode() for index, data in found.items() if data is not None}

    def connect_memory(self, is_wanted: bool) -> None:
        """Connects the memory of all workers, if all of them want it and are on one machine."""
        from kdist.communication.memory_offer import Offer  # imports NumPy

        def gather(value: T) -> list[T]:
            return [json.loads(data) for data in self.begin_gather_bytes(json.dumps(value).encode())()]

        offer = Offer(self.worker_index, self.num_workers, is_wanted)
        seconds = self.mail.timeout_seconds or liveness.engine_timeout()
        self.memory = offer.connect(gather(offer.description), gather, seconds)

    def limit_time(self, seconds: float | None) -> None:
        """Sets the timeout of messages, for another strategy that shares the connection."""
        self.mail.timeout_seconds = seconds

    def close(self) -> None:
        """Stops the stall watch and closes the shared memory. Called when the process exits."""
        self._stalls.close()
        if self.memory is not None:
            self.memory.close()
