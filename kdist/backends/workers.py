"""The workers of a strategy, as the runtime uses them on all backends."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kdist import communication
from kdist.cluster import Cluster, timeouts
from kdist.control import channel
from kdist.control.channel import Channel
from kdist.control.stalls import StallWatch

if TYPE_CHECKING:
    from kdist.arrays.types import T
    from kdist.communication.shared_memory import SharedMemory

_MOST_BYTES = 64 << 20


def in_parts(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields groups of variables to broadcast, so that a device has enough memory for a copy of each group."""
    some: list[T] = []
    size = 0
    for item in items:
        if some and size + nbytes(item) > _MOST_BYTES:
            yield some
            some, size = [], 0
        some.append(item)
        size += nbytes(item)
    if some:
        yield some


def folders_of_engine(*files: str) -> tuple[str, ...]:
    """Returns path prefixes of code that waits for other workers or devices, given a file per directory."""
    files = communication.__file__, *files  # sums in shared memory
    return channel.__file__, *(os.path.join(os.path.dirname(file), "") for file in files)


class Workers:
    """A single process without other workers."""

    num_workers = 1
    worker_index = 0
    communication = ""
    """The library that connects the devices of several workers, for example "nccl"."""

    def all_gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Gathers a message of any length from every worker, in the order of their indices. All must call it."""
        return self.begin_gather_bytes(data, timeout)()

    def begin_gather_bytes(self, data: bytes, timeout: float | None = None) -> Callable[[], list[bytes]]:
        """Sends a message to every worker and does not wait. All must call it.

        Args:
            data: The message.
            timeout: Seconds to wait for the other messages (default: the strategy's `timeout_seconds`).

        Returns:
            A function that waits and returns the messages. Call it once, before the next message begins.
        """
        return lambda: [data]

    def post(self, key: str, text: str) -> None:
        """Posts a text under a key: for all workers on the chief, otherwise for the chief. Does not wait."""

    def look_up(self, key: str) -> str | None:
        """Returns the text that was posted under a key, or `None`. Does not wait."""
        return None

    def lost(self) -> frozenset[int]:
        """Returns the workers that are lost or have ended. Does not wait, and is thread-safe."""
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


class JoinedWorkers(Workers, ABC):
    """The base class for the workers of a cluster. Each backend has a subclass."""

    memory: SharedMemory | None = None
    """The shared memory of the workers, if all of them are on one machine and have one CPU device."""

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self.num_workers = cluster.num_workers
        self.worker_index = cluster.worker_index
        self.names = cluster.worker_names
        self.channel = channel
        self._stalls = StallWatch(channel, self.waits_in)

    def begin_gather_bytes(self, data: bytes, timeout: float | None = None) -> Callable[[], list[bytes]]:
        """Sends a message without a collective, which would wait for running steps."""
        return self.channel.begin(data, timeout)

    def post(self, key: str, text: str) -> None:
        self.channel.post(key, text)

    def look_up(self, key: str) -> str | None:
        """Returns a posted text; raises an error if the chief is lost."""
        return self.channel.look_up(key)

    def lost(self) -> frozenset[int]:
        """Returns the workers that are lost or have ended."""
        return frozenset(self.channel.lost)

    @abstractmethod
    def waits_in(self, filename: str) -> bool:
        """Returns whether the main thread may wait for workers, given its innermost file outside Python."""

    def check_others(self) -> None:
        if lost := self.channel.wait_for_loss(0.0):
            raise self.channel.lost_error(lost)

    def connect_memory(self, is_wanted: bool) -> None:
        """Connects the memory of all workers, if all of them want it and are on one machine."""
        from kdist.communication.memory_offer import Offer  # imports NumPy

        offer = Offer(self.worker_index, self.num_workers, is_wanted)
        seconds = self.channel.timeout_seconds or timeouts.engine_timeout()
        gather = self.channel.gather_json
        self.memory = offer.connect(gather(offer.description), gather, seconds)
        if self.memory is not None:
            self.memory.check_others = self.check_others

    def limit_time(self, seconds: float | None) -> None:
        """Sets the timeout of messages, for another strategy that shares the connection."""
        self.channel.timeout_seconds = seconds

    def close(self) -> None:
        """Leaves the job. Called when the process exits."""
        self._stalls.close()
        if self.memory is not None:
            self.memory.close()
        self.channel.close()
