"""The rendezvous of the workers, with PyTorch's key-value store on the chief."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kdist.backends.joining import check_devices, closed_error, missing_error
from kdist.backends.mail import MOST_DIRECT
from kdist.backends.torch import lifeline
from kdist.backends.waiting import Waiting
from kdist.cluster import Cluster, environment, is_loopback, join_address, split_address
from kdist.cluster.addresses import port_error
from kdist.cluster.handshake import NotOfThisJobError, secret_error, secret_if_any
from kdist.communication.memory_offer import Offer
from kdist.communication.options import CommunicationImplementation
from kdist.communication.shared_memory import SharedMemory
from kdist.errors import ClusterConfigError

if TYPE_CHECKING:
    from kdist.arrays.types import T

# Seconds between two checks of the store while this worker waits for the others.
_PAUSE = 0.05
# Seconds for which the chief keeps its store open after a timeout, so that the others can read "gave up".
_FAREWELL = 1.0
# Seconds to wait for an answer. A chief that listens answers immediately.
_ANSWER = 8.0


class Meeting:
    """The store of a cluster during the rendezvous: a new one, or the store of the user's process group."""

    def __init__(self, cluster: Cluster, timeout: float, store: dist.Store | None = None) -> None:
        self.cluster = cluster
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._waiting = Waiting(cluster.worker_names, timeout)
        self.host, self._port = split_address(cluster.coordinator or "127.0.0.1:1")
        # After torchrun restarts a job, the job uses the same store again.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"kdist/{attempt}", store or self._make_store())

    def gather(self, name: str, value: T) -> list[T]:
        """Gathers a JSON value from every worker, in the order of the workers.

        Raises:
            WorkerTimeoutError: If workers do not join in time. The error names the missing workers.
            ClusterConfigError: If two processes have the same worker index.
        """
        cluster, store = self.cluster, self.store
        if store.add(f"{name}/claimed/{cluster.worker_index}", 1) > 1:
            raise ClusterConfigError(
                "Two processes have the same worker index.",
                received={"worker": cluster.worker_names[cluster.worker_index], "source": cluster.source},
                hint="Set a different index for each process: task.index in TF_CONFIG, or RANK.",
            )
        keys = [f"{name}/{index}" for index in range(cluster.num_workers)]
        store.set(keys[cluster.worker_index], json.dumps(value))
        # Of many workers, only the chief reads all values: 2 n requests instead of n * n.
        collects, collected = cluster.num_workers > MOST_DIRECT, f"{name}/all"
        awaited = [collected] if collects and not cluster.is_chief else keys
        while not store.check(awaited):
            gave_up = store.check(["gave up"])
            gives_up = gave_up or time.monotonic() > self._deadline
            if gives_up or (cluster.is_chief and self._waiting.is_due):
                self._waiting.note([index for index, key in enumerate(keys) if not store.check([key])])
            if gives_up:
                store.set("gave up", "")
                if cluster.is_chief and not gave_up:
                    time.sleep(_FAREWELL)
                raise missing_error(self.cluster, self._timeout, self._waiting.missing)
            time.sleep(_PAUSE)
        values: list[T] = (
            [json.loads(store.get(key)) for key in keys]
            if awaited is keys
            else json.loads(store.get(collected))
        )
        if collects and cluster.is_chief:
            store.set(collected, json.dumps(values))
        return values

    def open_lifeline(self) -> lifeline.Lifeline:
        """Connects this worker with the chief, or the chief with all workers; see `Lifeline`."""
        cluster = self.cluster
        secret = secret_if_any(join_address(self.host, self._port), warn=cluster.is_chief)
        try:
            if cluster.is_chief:
                with listen(self.host, 0) as server:
                    self.store.set("lifeline", str(server.getsockname()[1]))
                    connections = lifeline.wait_for_workers(
                        server, cluster.num_workers, self._deadline, secret
                    )
            else:
                port = int(self.store.get("lifeline"))
                connections = lifeline.connect_to_chief(
                    self.host, port, cluster.worker_index, self._deadline, secret
                )
        except NotOfThisJobError as error:
            raise secret_error(cluster.worker_names[0], error) from error
        except OSError as error:  # the chief's port works, because all workers have used it
            raise closed_error(cluster.worker_names[cluster.worker_index], error) from error
        return lifeline.Lifeline(cluster.worker_index, connections)

    def _make_store(self) -> dist.Store:
        timeout = timedelta(seconds=self._timeout)
        make = functools.partial(
            dist.TCPStore, self.host, self._port, wait_for_workers=False, timeout=timeout
        )
        if self.cluster.is_chief and not self.cluster.coordinator_taken:
            # Without this socket, PyTorch would listen on all interfaces.
            return make(is_master=True, master_listen_fd=listen(self.host, self._port).detach())
        self._wait_for_chief()
        answer: Future[dist.Store] = Future()

        def connect() -> None:
            try:
                answer.set_result(make(is_master=False))
            except Exception as error:
                answer.set_exception(error)

        # In a thread, because PyTorch has no timeout for a server that accepts and does not answer.
        threading.Thread(target=connect, name="kdist meeting", daemon=True).start()
        try:
            return answer.result(_ANSWER)
        except (RuntimeError, ValueError, TimeoutError) as error:
            said = str(error) or f"no answer in {_ANSWER:g} s"
            raise ClusterConfigError(
                "The program at the address of worker 0 does not belong to this job.",
                received={"address": self.cluster.coordinator, "error": said[:200]},
                hint="Choose another port, or terminate that program.",
            ) from error

    def _wait_for_chief(self) -> None:
        # PyTorch could wait itself, but Ctrl-C cannot interrupt it, and it prints warnings.
        while True:
            try:
                socket.create_connection((self.host, self._port), timeout=5.0).close()
                return
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise missing_error(self.cluster, self._timeout, [0]) from error
            if not self.cluster.is_chief:
                self._waiting.note([0])
            time.sleep(_PAUSE)


def listen(host: str, port: int) -> socket.socket:
    """Listens on the loopback interface if the job uses one machine, otherwise on all interfaces.

    With several machines, the name of the chief may resolve to another address on the chief itself.
    """
    where = host if is_loopback(host) else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((where, port), family=family, backlog=1024)
    except OSError as error:
        raise port_error(join_address(host, port), port, error) from error


def compare_workers(
    meeting: Meeting, devices: Sequence[str], implementation: CommunicationImplementation, seconds: float
) -> tuple[bool, SharedMemory | None]:
    """Compares the devices of all workers. Returns whether NCCL can be used, and the shared memory, if any."""
    cluster, is_wanted = meeting.cluster, implementation is not CommunicationImplementation.RING
    offer = Offer(cluster.worker_index, cluster.num_workers, is_wanted)
    found = meeting.gather("devices", describe_devices(devices) | {"memory": offer.description})
    nccl = compare_devices(cluster, found)
    offers = [theirs["memory"] for theirs in found]
    return nccl, offer.connect(offers, lambda ok: meeting.gather("memory", ok), seconds)


def compare_devices(cluster: Cluster, devices: Sequence[dict[str, Any]]) -> bool:
    """Checks that all workers have the same kind and number of devices. Returns whether NCCL can be used."""
    check_devices(cluster.worker_names, [(theirs["kind"], theirs["count"]) for theirs in devices])
    # NCCL refuses two processes on one GPU.
    gpus = [gpu for theirs in devices for gpu in theirs["gpus"]]
    return devices[0]["kind"] == "gpu" and len(set(gpus)) == len(gpus)


def describe_devices(names: Sequence[str]) -> dict[str, Any]:
    """Returns a JSON description of this worker's devices for the other workers."""
    gpus = [int(name.split(":")[1]) for name in names if name.startswith("gpu:")]
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in gpus]
    return {"kind": "gpu" if gpus else "cpu", "count": len(names), "gpus": uuids}
