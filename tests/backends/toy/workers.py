"""The workers of the toy backend: a dictionary in the process of worker 0, which all workers read and write."""

from __future__ import annotations

import contextlib
import threading
import time
from multiprocessing.managers import BaseManager
from typing import Any

from kdist.backends import stalls, workers
from kdist.backends.joining import join_once, wait_for_all
from kdist.backends.mail import Mail
from kdist.backends.store import Store
from kdist.cluster import Cluster, liveness, split_address
from kdist.cluster.secret import job_secret

_ENGINE = workers.folders_of_engine(__file__)
_FAREWELL = 10.0  # seconds that worker 0 waits until the others no longer need its dictionary


class Entries:
    """The dictionary. Each call of a worker runs in its own thread."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, data: bytes) -> None:
        """Stores data, and wakes the workers that wait for it."""
        with self._changed:
            self._entries[key] = data
            self._changed.notify_all()

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Waits for data."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._entries, seconds)
            return self._entries.get(key)

    def delete(self, key: str) -> None:
        """Removes data."""
        with self._changed:
            self._entries.pop(key, None)


class RemoteStore(Store):
    """The dictionary of worker 0. Pickles travel only after both sides have proved that they know the secret."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        address = str(cluster.coordinator)
        secret = job_secret([address]).encode()
        wait_for_all(cluster, address, timeout)
        if cluster.is_chief:
            entries = Entries()
            _Manager.register("entries", lambda: entries)
            server = _Manager(split_address(address), secret).get_server()
            threading.Thread(target=server.serve_forever, name="toy store", daemon=True).start()
        manager = _Manager(split_address(address), secret)
        deadline = time.monotonic() + timeout
        while True:
            try:
                manager.connect()
                break
            except (ConnectionError, EOFError):  # worker 0 is still leaving `wait_for_all`
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._remote: Any = manager.entries()  # type: ignore[attr-defined]

    def set(self, key: str, data: bytes) -> None:
        """Stores data under a key."""
        self._remote.set(key, data)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Returns the data under a key, or `None` if there is no data within `seconds`."""
        return self._remote.get(key, seconds)

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._remote.delete(key)


class _Manager(BaseManager):
    pass


_Manager.register("entries")


class ToyWorkers(workers.JoinedWorkers):
    """The workers of a cluster. They notice a worker that ends, but wait for a worker that hangs or is killed."""

    communication = "pickle"

    def __init__(self, cluster: Cluster, store: Store, seconds: float) -> None:
        super().__init__(cluster, store)
        self.mail = Mail(
            store, self.names, self.worker_index, seconds, check=self.check, explain=self.explain_failure
        )
        self._stalls.start()

    def check(self, index: int) -> None:
        """Raises an error if a worker has ended."""
        if self.look_up(f"ended/{index}") is not None:
            raise stalls.lost_error(self.names, self.worker_index, {index: stalls.ENDED})

    def waits_in(self, filename: str) -> bool:
        """Returns whether the main thread waits for the dictionary."""
        return filename.startswith(_ENGINE)

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names worker 0 if its dictionary is gone."""
        if isinstance(error, (EOFError, ConnectionError)):
            return stalls.lost_error(self.names, self.worker_index, {0: stalls.DIED}, error)
        return error

    def close(self) -> None:
        """Ends, and on worker 0 waits for the others, which may still read messages."""
        super().close()
        with contextlib.suppress(EOFError, ConnectionError):
            self.post(f"ended/{self.worker_index}", "")
            deadline = time.monotonic() + _FAREWELL
            for index in range(self.num_workers) if self.worker_index == 0 else ():
                self.store.get(f"ended/{index}", max(0.0, deadline - time.monotonic()))


def join(cluster: Cluster, timeout_seconds: float | None) -> ToyWorkers:
    """Waits until all workers have joined."""
    return join_once(
        cluster,
        timeout_seconds,
        lambda timeout: ToyWorkers(
            cluster, RemoteStore(cluster, timeout), timeout_seconds or liveness.engine_timeout()
        ),
    )
