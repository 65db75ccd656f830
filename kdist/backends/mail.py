"""`Mail`: messages between workers through the key-value store of the backend.

Workers can exchange messages during a step. A collective would have to wait for the collectives of the step.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kdist.backends import stalls, whereabouts
from kdist.backends.store import Store
from kdist.backends.threads import Errands
from kdist.cluster import liveness
from kdist.errors import WorkerTimeoutError

if TYPE_CHECKING:
    from kdist.arrays.types import T

# The interval in seconds at which a waiting worker checks whether the sender is still alive.
_GLANCE = 1.0
# Up to this number of workers, each one reads the message of each other one. With more workers, the chief reads them,
# and stores all in one entry for the others. This takes a step more, but about 3 n requests instead of n * n.
MOST_DIRECT = 8
# Above this number of bytes, the chief stores `_READ_THEM` instead.
_MOST_COLLECTED = 1 << 24
_READ_THEM = b""
_MOST_LISTED = 1 << 14  # bytes of a message: longer messages are read one by one, so that none is read twice
_ALL = "all"


class Mail:
    """Gathers messages. The n-th messages of all workers belong together.

    Args:
        store: The key-value store of the backend.
        names: The names of the workers.
        worker_index: The index of this worker.
        timeout_seconds: The timeout of a message. With `None`, a worker waits while the sender is alive.
        check: Called with the index of the sender while this worker waits. Raises if a worker is lost.
        explain: Returns an error that names the lost worker for an error of the store, or the same error.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        worker_index: int,
        timeout_seconds: float | None,
        check: Callable[[int], None],
        explain: Callable[[BaseException], BaseException],
    ) -> None:
        self._store = store
        self._check = check
        self._explain = explain
        self._names = names
        self._worker_index = worker_index
        self.timeout_seconds = timeout_seconds
        self._gathered = 0
        self._messenger = Errands("kdist messages")
        self._begun: tuple[Future[list[bytes]], queue.SimpleQueue[None]] | None = None
        self._patience = liveness.heartbeat_timeout()
        self._asked = 0.0  # the time of the unanswered request to the store; 0 if there is none

    def gather(self, data: bytes) -> list[bytes]:
        """Sends a message to every worker, and waits for the messages of the others."""
        return self.begin(data)()

    def begin(self, data: bytes) -> Callable[[], list[bytes]]:
        """Gathers in a background thread. Returns a function that waits for the messages."""
        if self._begun is not None:
            self._wait_for(*self._begun)
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        begun = self._messenger.submit(self._gather, data)
        begun.add_done_callback(lambda _: ended.put(None))
        self._begun = begun, ended

        def finish() -> list[bytes]:
            with whereabouts.inside("an exchange of messages"):
                self._wait_for(begun, ended)
            return begun.result()

        return finish

    def _wait_for(self, begun: Future[list[bytes]], ended: queue.SimpleQueue[None]) -> None:
        """Waits for a message, so that the stall watch sees a thread that waits for other workers.

        The watch checks the file of the innermost frame. New frames would look like progress.
        """
        while not begun.done():
            if sys.is_finalizing() or self._messenger.is_here():
                raise RuntimeError(
                    "Cannot wait for messages of other workers: the program ends, or this is the messenger thread."
                )
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=_GLANCE)
                return
            if (asked := self._asked) and time.monotonic() - asked > self._patience:
                # The chief, which holds the store, was suspended, and the backend has no timeout.
                raise stalls.lost_error(self._names, self._worker_index, {0: "it no longer responds"})

    def _gather(self, data: bytes) -> list[bytes]:
        turn, self._gathered = self._gathered, self._gathered + 1
        self._ask(self._store.set, _key(turn, self._worker_index), data)
        if not (collects := len(self._names) > MOST_DIRECT):
            everyone = self._receive_each(turn, data)
        elif self._worker_index == 0:
            everyone = self._collect(turn)
        else:
            everyone = self._receive_all(turn, data)
        if turn > 0:
            # All workers have sent this turn's message, so they have read all messages of the previous turn.
            self._ask(self._store.delete, _key(turn - 1, self._worker_index))
            if collects and self._worker_index == 0:
                self._ask(self._store.delete, _key(turn - 1, _ALL))
        return everyone

    def _receive_each(self, turn: int, data: bytes, began: float | None = None) -> list[bytes]:
        return [
            data if index == self._worker_index else self._receive(_key(turn, index), index, began)
            for index in range(len(self._names))
        ]

    def _collect(self, turn: int) -> list[bytes]:
        """Reads the messages of all workers, and stores them for the others."""
        key, keys = _key(turn, _ALL), [_key(turn, index) for index in range(len(self._names))]
        found: dict[str, bytes] = {}
        try:
            for index, own in enumerate(keys):
                if own not in found:
                    found[own] = self._receive(own, index)
                    # One request for a thousand messages takes 5 ms, and a thousand requests take 350 ms.
                    if len(found[own]) <= _MOST_LISTED:
                        found |= self._ask(self._store.get_all, _folder(turn))
        except Exception:
            # The others then look for the missing message themselves, and get the same error.
            with contextlib.suppress(Exception):
                self._store.set(key, _READ_THEM)
            raise
        everyone = [found[own] for own in keys]
        fits = sum(map(len, everyone)) <= _MOST_COLLECTED
        self._ask(self._store.set, key, _join(everyone) if fits else _READ_THEM)
        return everyone

    def _receive_all(self, turn: int, data: bytes) -> list[bytes]:
        """Reads the entry in which the chief has stored all messages."""
        collected, began = _READ_THEM, time.monotonic()
        with contextlib.suppress(WorkerTimeoutError):  # the chief may still wait for another worker
            collected = self._receive(_key(turn, _ALL), 0)
        return _split(collected) if collected else self._receive_each(turn, data, began)

    def _ask(self, function: Callable[..., T], *args: object) -> T:
        self._asked = time.monotonic()
        try:
            return function(*args)
        except Exception as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._asked = 0.0

    def _receive(self, key: str, index: int, began: float | None = None) -> bytes:
        began = time.monotonic() if began is None else began
        data: bytes | None
        while (data := self._ask(self._store.get, key, _GLANCE)) is None:
            self._check(index)
            waited = time.monotonic() - began
            if self.timeout_seconds is not None and waited >= self.timeout_seconds:
                raise WorkerTimeoutError(
                    f"{self._names[index]} did not respond within {self.timeout_seconds:g} s. This worker needs it for "
                    f"{whereabouts.describe_wait()}.",
                    hint=f"Read the log of {self._names[index]}, or wait longer: "
                    "kdist.experimental.CommunicationOptions(timeout_seconds=3600)",
                )
        return data


def _folder(turn: int) -> str:
    return f"kdist/message/{turn}"


def _key(turn: int, name: int | str) -> str:
    return f"{_folder(turn)}/{name}"


def _join(messages: Sequence[bytes]) -> bytes:
    """Packs and compresses messages, because many workers often send equal messages."""
    lengths = ",".join(str(len(message)) for message in messages).encode()
    return zlib.compress(b"".join([lengths, b";", *messages]), level=1)


def _split(data: bytes) -> list[bytes]:
    lengths, _, rest = zlib.decompress(data).partition(b";")
    ends = list(itertools.accumulate(map(int, lengths.split(b","))))
    return [rest[start:end] for start, end in zip([0, *ends], ends, strict=False)]
