"""Joining the workers of a cluster on JAX, and what they tell each other."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.backend

from kdist.backends.device_names import short_name
from kdist.backends.jax import meeting
from kdist.backends.jax.devices import request_cpus
from kdist.backends.jax.watch import Watch, has_started, service_client
from kdist.backends.mail import Mail, Store
from kdist.cluster import (
    environment,
    visible_gpus,
)
from kdist.communication.options import CommunicationImplementation, hint_ignored
from kdist.errors import (
    DeviceError,
    StrategyScopeError,
    WorkerLostError,
    WorkerMismatchError,
)

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.communication.options import CommunicationOptions

_joined: tuple[Cluster, JoinedWorkers] | None = None


class Workers:
    """This process alone."""

    num_workers = 1
    worker_index = 0

    def all_devices(self, local: Sequence[Any]) -> list[Any]:
        """Returns the devices of all workers, those of worker 0 first."""
        return list(local)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker, in the order of their indices."""
        return [data]

    def post(self, key: str, text: str) -> None:
        """Leaves a text for the other workers."""

    def look_up(self, key: str) -> str | None:
        """Returns the text that a worker has left under a key."""
        return None

    def lost(self) -> frozenset[int]:
        """Returns the workers that are known to be lost."""
        return frozenset()

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Starts to gather a message from every worker; returns what waits for all of them."""
        return lambda: [data]

    def working(self) -> AbstractContextManager[Any]:
        """Entered for as long as this worker cannot go on without the others."""
        return contextlib.nullcontext()

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns an error that names the worker that was lost, where `error` comes from that."""
        return error


class JoinedWorkers(Workers):
    """The workers of a cluster, joined through JAX's coordination service, which lives in worker 0.

    Args:
        cluster: Who takes part.
        timeout_seconds: How long a message may take; `None` for as long as its sender is there.
    """

    def __init__(self, cluster: Cluster, timeout_seconds: float | None) -> None:
        self.num_workers = cluster.num_workers
        self.worker_index = cluster.worker_index
        self._names = cluster.worker_names
        self._client = service_client()
        self._watch = Watch(cluster, self._client)
        store = ServiceStore(self._client, self._watch, lambda error: self._explained(error, tells=False))
        self.mail = Mail(store, cluster.worker_names, cluster.worker_index, timeout_seconds)

    def all_devices(self, local: Sequence[Any]) -> list[Any]:
        """Returns the devices of all workers; raises unless all have as many, of one kind."""
        platform = local[0].platform
        mine = json.dumps([platform, [device.id for device in local]]).encode()
        everyone = [json.loads(data) for data in self.all_gather_bytes(mine)]
        for index, (kind, ids) in enumerate(everyone):
            if kind != everyone[0][0] or len(ids) != len(everyone[0][1]):
                raise WorkerMismatchError(
                    "Every worker must have the same number of devices, of the same kind.",
                    received={self._names[i]: f"{len(everyone[i][1])} {everyone[i][0]}" for i in (0, index)},
                    hint="Pass `devices` to the strategy, or show each worker as many devices.",
                )
        with self.working():
            by_id = {device.id: device for device in jax.devices(platform)}
        return [by_id[number] for _, ids in everyone for number in ids]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers a message from every worker through the key-value store of the service."""
        self._watch.check()
        with self._told():
            return self.mail.gather(data)

    def begin_gather_bytes(self, data: bytes) -> Callable[[], list[bytes]]:
        """Gathers in a thread, which asks for the messages while this one goes on."""
        self._watch.check()
        with self.working():
            begun = self.mail.begin(data)

        def finish() -> list[bytes]:
            with self._told():
                return begun()

        return finish

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Within this, the main thread waits for messages; an error goes to the user."""
        with self.working():
            try:
                yield
            except WorkerLostError:
                self._watch.has_told()
                raise

    def post(self, key: str, text: str) -> None:
        """Leaves a text in the key-value store of the service, which the chief holds."""
        self._client.key_value_set(key, text)

    def look_up(self, key: str) -> str | None:
        """Returns a text from the key-value store."""
        self._watch.check(0)
        try:
            return str(self._client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def lost(self) -> frozenset[int]:
        """Returns the workers whose loss the watch has noticed."""
        return self._watch.lost

    def working(self) -> AbstractContextManager[Any]:
        """Within this, the process is ended if a worker is lost and no error of JAX's reports it."""
        return self._watch.working()

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns a `WorkerLostError` for an error of JAX's about a connection."""
        return self._explained(error, tells=True)

    def _explained(self, error: BaseException, tells: bool) -> BaseException:
        if isinstance(error, WorkerLostError) or not _is_about_connections(error):
            return error
        return self._watch.explain(error, tells)


class ServiceStore(Store):
    """The key-value store of the coordination service, which the chief holds.

    Args:
        client: The client of the service.
        watch: Knows who is lost.
        explain_failure: Names the worker that an error of JAX's is about.
    """

    def __init__(
        self, client: Any, watch: Watch, explain_failure: Callable[[BaseException], BaseException]
    ) -> None:
        self._client = client
        self._watch = watch
        self._explain_failure = explain_failure

    def put(self, key: str, data: bytes) -> None:
        """Leaves data under a key."""
        self._client.key_value_set_bytes(key, data)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Waits for data."""
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._explain_failure(error) from error

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._client.key_value_delete(key)

    def check(self, index: int) -> None:
        """Asks the watch."""
        self._watch.check(index, tells=False)


# JAX raises ValueError or JaxRuntimeError with the words of XLA, gloo, NCCL or gRPC.
_CONNECTION_WORDS = re.compile(
    r"gloo|nccl|coordination.?service|connection (reset|closed|refused)|heartbeat|rendezvous"
    r"|^(UNAVAILABLE|ABORTED)",
    re.IGNORECASE,
)


def _is_about_connections(error: BaseException) -> bool:
    return isinstance(error, (ValueError, RuntimeError)) and bool(_CONNECTION_WORDS.search(str(error)))


def join(devices: Sequence[str], cluster: Cluster | None, options: CommunicationOptions) -> Workers:
    """Waits for all workers of the cluster and connects them.

    A process joins once: another strategy with the same cluster shares the connection.

    Args:
        devices: The devices of this worker, `()` for those that the backend prefers.
        cluster: Who takes part; `None` for this process alone.
        options: What the user wishes of the collectives.

    Raises:
        WorkerTimeoutError: A worker did not come in time; names it.
        ClusterConfigError: The port of the chief is in use.
        StrategyScopeError: JAX has computed something already, or this process has joined another cluster.
        DeviceError: NCCL was asked for and there is no GPU.
    """
    global _joined
    _check_options(devices, options, 0 if cluster is None else cluster.worker_index)
    names = [short_name(name) for name in devices]
    if cluster is None or cluster.num_workers == 1:
        request_cpus(names)
        return Workers()
    if _joined is not None:
        return _joined_again(cluster, options)
    if has_started():
        raise StrategyScopeError(
            "The workers must be joined before JAX has computed anything, and it already has.",
            received={"this_worker": cluster.worker_names[cluster.worker_index]},
            hint="Create kdist.MultiWorkerMirroredStrategy() at the start of the program.",
        )
    request_cpus(names)
    timeout = float(environment.get("KDIST_JOIN_TIMEOUT") or 300)
    coordinator, own_host = meeting.meet(cluster, timeout)
    meeting.initialize(cluster, coordinator, own_host, names)
    workers = JoinedWorkers(cluster, options.timeout_seconds)
    _joined = (cluster, workers)
    return workers


def _check_options(devices: Sequence[str], options: CommunicationOptions, worker_index: int) -> None:
    if options.implementation is CommunicationImplementation.NCCL:
        kinds = {short_name(name).split(":")[0] for name in devices} or (
            {"gpu"} if visible_gpus() else {"cpu"}
        )
        if kinds != {"gpu"}:
            raise DeviceError(
                "NCCL needs GPUs: it runs on NVIDIA GPUs only, and this worker uses none.",
                received={"implementation": "NCCL", "devices": tuple(devices)},
                hint="Leave the implementation at AUTO: JAX takes NCCL between GPUs and gloo between CPUs.",
            )
    if options.bytes_per_pack:
        hint_ignored("bytes_per_pack", "on JAX, XLA groups the collectives.", worker_index)


def _joined_again(cluster: Cluster, options: CommunicationOptions) -> Workers:
    assert _joined is not None
    before, workers = _joined
    facts = ("num_workers", "worker_index", "coordinator", "addresses")
    if any(getattr(before, fact) != getattr(cluster, fact) for fact in facts):
        raise StrategyScopeError(
            "A process can join one cluster only, and this one has already joined another.",
            received={"joined": before.worker_names, "wanted": cluster.worker_names},
            hint="Use one cluster in a program; several strategies may share it.",
        )
    workers.mail.timeout_seconds = options.timeout_seconds
    return workers
