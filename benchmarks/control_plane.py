"""Cost of one agreement on the rows of the next steps, for 2 to 4,096 simulated workers.

    python benchmarks/control_plane.py [rounds]

One process simulates all workers, with the key-value store of JAX's coordination service. The messages of the other
workers are in the store when the chief begins. Therefore, the times contain neither a network nor late workers. For
the chief and for another worker, the benchmark prints the median time per agreement, the number of requests to the
store, and the number of bytes that the worker sends and receives.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import jax

from kdist.backends.jax.store import ServiceStore
from kdist.backends.jax.watch import service_client
from kdist.backends.mail import MOST_DIRECT, Mail
from kdist.backends.store import Store
from kdist.cluster.addresses import free_ports

WORKERS = (2, 8, 9, 64, 256, 1024, 4096)
# Three steps with one replica; see `kdist.data.agreement`.
MESSAGE = {
    "counts": [[32], [32], [32]],
    "kinds": ["0123456789abcdef"] * 3,
    "ended": False,
    "waits": False,
    "error": None,
}


class Counting(Store):
    """A store that counts its requests and bytes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.requests = self.bytes = 0

    def _count(self, data: bytes | None = b"") -> None:
        self.requests += 1
        self.bytes += len(data or b"")

    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key."""
        self._count(data)
        self.store.set(key, data)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key."""
        data = self.store.get(key, seconds)
        self._count(data)
        return data

    def get_all(self, folder: str) -> dict[str, bytes]:
        """Returns all data under a prefix."""
        found = self.store.get_all(folder)
        self._count(b"".join(found.values()))
        return found

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._count()
        self.store.delete(key)


def measure(store: Store, workers: int, rounds: int) -> list[tuple[float, float, float]]:
    """Returns the median milliseconds, requests and bytes per agreement, of the chief and of the last worker."""
    data, last = json.dumps(MESSAGE).encode(), workers - 1
    counts = Counting(store), Counting(store)
    mails = [
        Mail(
            counted, [f"worker {i}" for i in range(workers)], index, None, lambda _: None, lambda error: error
        )
        for counted, index in zip(counts, (0, last), strict=True)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for index in range(1, last):
            store.set(f"kdist/message/{turn}/{index}", data)
        answer = mails[1].begin(data)  # waits for the chief, in a thread
        while store.get(f"kdist/message/{turn}/{last}") is None:
            time.sleep(0.001)
        times[0].append(_milliseconds(lambda: mails[0].gather(data)))
        answer()
        # The same request again, because the thread has waited for the chief.
        key = "all" if workers > MOST_DIRECT else "0"
        requests = 1 if workers > MOST_DIRECT else workers - 1
        times[1].append(
            requests * _milliseconds(lambda turn=turn, key=key: store.get(f"kdist/message/{turn}/{key}", 1.0))
        )
        for index in range(1, last):
            store.delete(f"kdist/message/{turn}/{index}")
    store.delete("kdist/message")
    return [
        (statistics.median(taken), counted.requests / rounds, counted.bytes / rounds)
        for taken, counted in zip(times, counts, strict=True)
    ]


def _milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Prints a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    jax.distributed.initialize(f"127.0.0.1:{free_ports(1)[0]}", 1, 0)
    store = ServiceStore(service_client())
    print("workers | chief: ms, requests, bytes | another worker: ms, requests, bytes")
    for workers in WORKERS:
        cells = [
            f"{taken:.1f}, {requests:.1f}, {size:,.0f}"
            for taken, requests, size in measure(store, workers, rounds)
        ]
        print(f"{workers:,} | {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
