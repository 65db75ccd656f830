"""Compares the devices of the workers, and opens PyTorch's key-value store on the chief."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kdist.cluster import Cluster, join_address, split_address
from kdist.cluster.addresses import port_error
from kdist.control.joining import check_devices, closed_error
from kdist.control.rendezvous import listen

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Gathers a JSON value from each worker."""


def open_store(
    cluster: Cluster, devices: Sequence[str], timeout: float, gather: Gather
) -> tuple[dist.Store, bool]:
    """Returns the store with which the process group connects, and whether NCCL can be used."""
    host, port = split_address(cluster.coordinator)
    store = None
    limit = timedelta(seconds=timeout)
    if cluster.is_chief:
        # Without this socket, PyTorch would listen on all interfaces.
        try:
            server = listen(host, 0 if cluster.coordinator_taken else port)
        except OSError as error:
            raise port_error(join_address(host, port), port, error) from error
        port = server.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=server.detach(),
        )
    found = gather(describe_devices(devices) | {"port": port})
    nccl = compare_devices(cluster, found)
    if store is None:
        try:
            store = dist.TCPStore(host, found[0]["port"], is_master=False, timeout=limit)
        except RuntimeError as error:
            raise closed_error(cluster.worker_names[cluster.worker_index], error) from error
    return store, nccl


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
