"""Which devices PyTorch has, under the names that kdist uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdist.backends.device_names import missing_device, short_name
from kdist.cluster import Cluster


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the short names of the devices of a kind; of the GPUs, or else the CPU, where none is given."""
    gpus = tuple(f"gpu:{i}" for i in range(torch.cuda.device_count()))
    if kind == "gpu":
        return gpus
    if kind == "cpu":
        return ("cpu:0",)
    return () if kind else gpus or ("cpu:0",)


def require_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns the short names of devices that exist.

    There may be as many CPU devices as anybody likes: to PyTorch, all of them are the one CPU.

    Raises:
        DeviceError: A GPU is not there.
    """
    names = tuple(short_name(device) for device in devices)
    gpus = list_devices("gpu")
    for name in names:
        if not name.startswith("cpu:") and name not in gpus:
            raise missing_device(name, (*gpus, "cpu:0"))
    return names


def devices_of_worker(cluster: Cluster | None) -> tuple[str, ...]:
    """Returns the devices of a worker where the user names none: its part of the GPUs, or the CPU."""
    gpus = list_devices("gpu")
    if cluster is None or not gpus:
        return gpus or ("cpu:0",)
    each = len(gpus) // cluster.local_workers
    if each == 0:
        return (gpus[cluster.local_rank % len(gpus)],)
    first = cluster.local_rank * each
    return gpus[first : first + each]


def torch_device(name: str) -> torch.device:
    """Returns PyTorch's device for a short name: `"gpu:1"` is `cuda:1`, and every CPU is `cpu`."""
    kind, index = name.split(":")
    return torch.device("cuda", int(index)) if kind == "gpu" else torch.device("cpu")


def first_device() -> torch.device:
    """Returns the device of this process, whatever `keras.device` says."""
    return torch_device(list_devices()[0])
