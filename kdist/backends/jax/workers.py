"""Joins the workers of a cluster on JAX, and exchanges messages between them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax

from kdist.backends import workers
from kdist.backends.device_names import short_name
from kdist.backends.jax import rendezvous
from kdist.backends.jax.devices import request_cpus
from kdist.backends.jax.dispatched import first_unfinished
from kdist.backends.jax.watch import Watch, has_started, service_client
from kdist.backends.workers import Workers
from kdist.cluster import Cluster, visible_gpus
from kdist.communication.options import CommunicationImplementation, CommunicationOptions, hint_ignored
from kdist.control.channel import Channel
from kdist.control.joining import OpenChannel, check_devices, join_once
from kdist.errors import StrategyScopeError, WorkerLostError

_ENGINE = workers.folders_of_engine(jax.__file__, __file__)


class JoinedWorkers(workers.JoinedWorkers):
    """The workers of a cluster, joined through JAX's coordination service, which runs in worker 0.

    `may_share` permits CPUs of one machine to sum in shared memory.
    """

    def __init__(self, cluster: Cluster, channel: Channel, may_share: bool) -> None:
        self._may_share = may_share
        super().__init__(cluster, channel)
        self._watch = Watch(cluster, channel)
        self._stalls.start()

    def share_memory(self, is_wanted: bool) -> None:
        """Connects the memory of all workers, at the first call, if all workers want it."""
        if not self._may_share:
            return
        self._may_share = False
        self.connect_memory(is_wanted)
        if self.memory is not None:
            self.memory.check_others = lambda: self._watch.check(tells=False)

    def begin_gather_bytes(self, data: bytes, timeout: float | None = None) -> Callable[[], list[bytes]]:
        begun = super().begin_gather_bytes(data, timeout)

        def finish() -> list[bytes]:
            try:
                return begun()
            except WorkerLostError:
                self._watch.has_told()
                raise

        return finish

    def waits_in(self, filename: str) -> bool:
        """Returns whether a program is running, or the main thread is inside JAX."""
        return filename.startswith(_ENGINE) or first_unfinished() is not None

    def working(self) -> AbstractContextManager[object]:
        """Returns a context that terminates the process if a worker is lost and JAX raises no error."""
        return self._watch.working()

    def explain_failure(self, error: BaseException) -> BaseException:
        """Returns a `WorkerLostError` for a connection error of JAX if a worker is lost."""
        is_of_the_engine = isinstance(error, (ValueError, RuntimeError)) and not isinstance(
            error, WorkerLostError
        )
        if is_of_the_engine and _CONNECTION_WORDS.search(str(error)):
            return self._watch.explain(error)
        return error

    def close(self) -> None:
        """Leaves the job. The chief waits for the others, which need its coordination service."""
        self._stalls.close()
        self._watch.leave()
        super().close()


# JAX raises ValueError or JaxRuntimeError with messages of XLA, gloo, NCCL or gRPC.
_CONNECTION_WORDS = re.compile(
    r"WorkerLostError|gloo|nccl|coordination.?service|connection (reset|closed|refused)|heartbeat|rendezvous"
    r"|^(UNAVAILABLE|ABORTED)",
    re.IGNORECASE,
)


def all_devices(group: Workers, local: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns all workers' devices in worker order; all workers need the same number and kind of devices."""
    if not isinstance(group, JoinedWorkers):
        return list(local)
    platform = local[0].platform
    mine = json.dumps([platform, [device.id for device in local]]).encode()
    everyone = [json.loads(data) for data in group.all_gather_bytes(mine)]
    check_devices(group.names, [(kind, len(ids)) for kind, ids in everyone])
    group.share_memory(platform == "cpu" and len(local) == 1)
    with group.working():
        by_id = {device.id: device for device in jax.devices(platform)}
    return [by_id[number] for _, ids in everyone for number in ids]


def join(devices: Sequence[str], cluster: Cluster | None, options: CommunicationOptions) -> Workers:
    """Waits for all workers and connects them; see `Backend.create_runtime`. `None` means a single process.

    A process joins only once: another strategy with the same cluster shares the connection. If the user has
    called `jax.distributed.initialize`, kdist uses that session.
    """
    _check_options(devices, options, 0 if cluster is None else cluster.worker_index)
    names = [short_name(name) for name in devices]
    if cluster is None or cluster.num_workers == 1:
        request_cpus(names)
        return Workers()

    def connect(open_channel: OpenChannel, timeout: float) -> JoinedWorkers:
        is_joined = service_client() is not None
        if is_joined:
            rendezvous.check_session(cluster)
        elif has_started():
            raise StrategyScopeError(
                "Cannot join the workers: JAX has already started.",
                received={"this_worker": cluster.worker_names[cluster.worker_index]},
                hint="Create the strategy at the start of the program, before you use JAX.",
            )
        request_cpus(names)
        if is_joined:
            _, channel = open_channel(None)
        else:
            channel = rendezvous.open_channel(cluster, open_channel, names)
        may_share = options.implementation is not CommunicationImplementation.RING
        return JoinedWorkers(cluster, channel, may_share)

    return join_once(cluster, options.timeout_seconds, connect)


def _check_options(devices: Sequence[str], options: CommunicationOptions, worker_index: int) -> None:
    options.for_devices(
        [short_name(name) for name in devices] or ["gpu:0" if visible_gpus() else "cpu:0"], worker_index
    )
    if options.bytes_per_pack:
        hint_ignored("bytes_per_pack", "on JAX, XLA groups the gradients.", worker_index)
