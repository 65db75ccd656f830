"""Meeting on JAX: waits until all workers of a cluster are there, and connects them with `jax.distributed`."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.backend

from kdist.backends.jax.watch import service_client
from kdist.backends.joining import wait_for_all
from kdist.cluster import (
    Cluster,
    choose_nccl_interface,
    is_loopback,
    liveness,
    own_gpus,
    split_address,
    visible_gpus,
)
from kdist.errors import StrategyScopeError

# A worker that has sent no heartbeat for this share of the timeout counts as lost; JAX's own default is 100 s.
_SILENCE = 0.4


def meet(cluster: Cluster, timeout: float, devices: Sequence[str]) -> None:
    """Waits until all workers are there, and connects this one, with its devices (`()`: as the backend prefers).

    JAX would wait too, but where a worker does not come it ends the process from C++ instead of raising an
    error that could say who is missing.
    """
    chief = None if cluster.coordinator_taken else str(cluster.coordinator)
    addresses = wait_for_all(cluster, chief, timeout)
    coordinator = chief or addresses[0]
    # A task that fails must not end the others from C++, before they can say why: `Watch` sees to them.
    jax.config.update("jax_enable_recoverability", True)
    # Its handler of SIGTERM would keep a worker alive that is asked to end.
    jax.config.update("jax_enable_preemption_service", False)
    if visible_gpus():
        choose_nccl_interface(cluster)
    _use_gloo(split_address(addresses[cluster.worker_index])[0])
    with without_chatter():
        jax.distributed.initialize(
            coordinator,
            cluster.num_workers,
            cluster.worker_index,
            local_device_ids=_local_gpus(cluster, devices),
            cluster_detection_method="deactivate",
            initialization_timeout=60,  # all workers are there already
            heartbeat_timeout_seconds=max(1, round(liveness.heartbeat_timeout() * _SILENCE)),
            coordinator_bind_address=coordinator if is_loopback(split_address(coordinator)[0]) else None,
        )


def check_session(cluster: Cluster) -> None:
    """Raises unless the session of `jax.distributed` that the user has made is that of a cluster."""
    from jax._src import distributed

    state = distributed.global_state
    if (state.process_id, state.num_processes) != (cluster.worker_index, cluster.num_workers):
        raise StrategyScopeError(
            "The existing session of jax.distributed does not match the cluster of the strategy.",
            received={
                "process_id": state.process_id,
                "num_processes": state.num_processes,
                "cluster": cluster.worker_names,
                "worker_index": cluster.worker_index,
            },
            hint="Remove your call of `jax.distributed.initialize`: kdist calls it.",
        )


def _use_gloo(own_host: str) -> None:
    """Has CPU collectives use gloo, listening at the interface that leads to the other workers.

    gloo's own choice is the address of this machine's name, which may be the loopback interface, by which
    nobody else can be reached, or a public one for a job of one machine. JAX has no option for it.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not _can_listen(own_host):
        return
    try:
        from jax._src.lib import _jax
        from jax._src.xla_bridge import make_cpu_client

        make_gloo = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):  # another JAX: its own choice then
        return

    def make_client() -> Any:
        return make_cpu_client(collectives=make_gloo(distributed_client=service_client(), hostname=own_host))

    jax.extend.backend.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _can_listen(host: str) -> bool:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
        return True
    except OSError:
        return False


def _local_gpus(cluster: Cluster, devices: Sequence[str]) -> list[int] | None:
    """Returns the GPUs that JAX may open in this worker; `None` for all that it sees."""
    count = len(visible_gpus())
    mine = own_gpus(cluster, count)
    return None if devices or len(mine) == count else list(mine)


# What gloo and the coordination service say of themselves when all is well, on every worker.
_CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected|Using experimental recoverable task feature")


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Holds back what C++ prints meanwhile, and lets everything but the usual chatter through afterwards."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        saved = [os.dup(1), os.dup(2)]
        for stream in (1, 2):
            os.dup2(held.fileno(), stream)
        try:
            yield
        finally:
            for stream, original in zip((1, 2), saved, strict=True):
                os.dup2(original, stream)
                os.close(original)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not _CHATTER.search(line)))
