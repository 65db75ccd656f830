"""Rendezvous on JAX: waits for all workers of a cluster, and connects them with `jax.distributed`."""

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
from kdist.cluster import (
    Cluster,
    choose_nccl_interface,
    is_loopback,
    own_gpus,
    split_address,
    timeouts,
    visible_gpus,
)
from kdist.control.channel import Channel
from kdist.control.joining import OpenChannel
from kdist.errors import StrategyScopeError

# kdist's channel detects lost workers. After this share of the timeout without a heartbeat, JAX terminates a worker
# from C++ without naming another one, so this must be longer than all times of the channel,
# plus the time that a slow machine needs to print the error and to end.
_SILENCE = 8.0


def open_channel(cluster: Cluster, connect: OpenChannel, devices: Sequence[str]) -> Channel:
    """Waits for all workers, and connects this worker and its devices (`()` for the backend's default).

    JAX also waits, but if a worker is missing, it terminates the process from C++. kdist raises an error that
    names the missing workers instead.
    """
    chief = None if cluster.coordinator_taken else str(cluster.coordinator)
    addresses, channel = connect(chief)
    coordinator = chief or addresses[0]
    # A failed task must not terminate the others from C++ before they can report why. `Watch` handles it.
    jax.config.update("jax_enable_recoverability", True)
    # Its SIGTERM handler would keep a worker alive that is asked to end.
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
            initialization_timeout=60,  # all workers have already arrived
            heartbeat_timeout_seconds=max(1, round(timeouts.heartbeat_timeout() * _SILENCE)),
            coordinator_bind_address=coordinator if is_loopback(split_address(coordinator)[0]) else None,
        )
    return channel


def check_session(cluster: Cluster) -> None:
    """Raises an error if the user's `jax.distributed` session does not match a cluster."""
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
    """Makes CPU collectives use gloo on the network interface that leads to the other workers.

    By default, gloo uses the address of this host's name. This can be the loopback interface, which other
    hosts cannot reach, or a public interface for a job on one host. JAX has no option for it.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not _can_listen(own_host):
        return
    try:
        from jax._src.lib import _jax
        from jax._src.xla_bridge import make_cpu_client

        make_gloo = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):  # other JAX versions; gloo chooses the interface
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
    """Returns the GPUs that JAX may open in this worker, or `None` for all visible GPUs."""
    count = len(visible_gpus())
    mine = own_gpus(cluster, count)
    return None if devices or len(mine) == count else list(mine)


# Messages of gloo and the coordination service that appear on every worker without a problem.
_CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected|Using experimental recoverable task feature")


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Captures the output of C++ code, and prints it afterwards without the usual status messages."""
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
