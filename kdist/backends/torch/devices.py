"""The devices of PyTorch, with kdist's names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from kdist.backends.device_names import missing_device, short_name
from kdist.cluster import Cluster, own_gpus


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the short names of the devices of a kind. By default, the GPUs, or the CPU without GPUs."""
    gpus = tuple(f"gpu:{i}" for i in range(torch.cuda.device_count()))
    if kind == "gpu":
        return gpus
    if kind == "cpu":
        return ("cpu:0",)
    return () if kind else gpus or ("cpu:0",)


def require_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns the short names of devices, after a check that they exist.

    Any number of CPU devices is valid, because PyTorch maps all of them to one CPU.
    """
    names = tuple(short_name(device) for device in devices)
    gpus = list_devices("gpu")
    for name in names:
        if not name.startswith("cpu:") and name not in gpus:
            raise missing_device(name, (*gpus, "cpu:0"))
    return names


def devices_of_worker(cluster: Cluster | None) -> tuple[str, ...]:
    """Returns the default devices of a worker: its share of the GPUs, or the CPU."""
    gpus = list_devices("gpu")
    return tuple(gpus[index] for index in own_gpus(cluster, len(gpus))) or ("cpu:0",)


def flat_array(tensor: torch.Tensor) -> np.ndarray | None:
    """Returns a flat array in the memory of a tensor, or `None` if NumPy cannot use this memory."""
    if tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype not in _NUMPY_DTYPES:
        return None
    flat = tensor.detach().view(-1)
    if tensor.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


_NUMPY_DTYPES = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    + [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
)


def current_gpu() -> AbstractContextManager[object]:
    """Captures the current GPU of this thread, if PyTorch uses GPUs, to enter it in another thread."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return torch.cuda.device(torch.cuda.current_device())


class ThreadStates:
    """PyTorch's thread-local state, copied from the thread of the user's call to the replica threads.

    This includes the current device, because kernels of Triton and `torch.compile` run on it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = {device: torch.cuda.current_stream(device) for device in gpus}
        self._inference = torch.is_inference_mode_enabled()
        kinds = {device.type for device in devices} if len(devices) > 1 else ()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
        ]

    @contextlib.contextmanager
    def entered(self, device: torch.device, is_other_thread: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if is_other_thread:
                if self._inference:
                    stack.enter_context(torch.inference_mode())
                for kind, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))  # also sets the current device
            yield


def keras_device(device: torch.device) -> AbstractContextManager[object]:
    """Lets Keras use a device. Keras uses special code for GPUs, but only under the name "cuda" without a number."""
    is_current = device.type == "cuda" and device.index == torch.cuda.current_device()
    return keras.device("cuda" if is_current else str(device))


def torch_device(name: str) -> torch.device:
    """Returns the PyTorch device of a short name: `"gpu:1"` is `cuda:1`, and every CPU is `cpu`."""
    kind, index = name.split(":")
    return torch.device("cuda", int(index)) if kind == "gpu" else torch.device("cpu")


def first_device() -> torch.device:
    """Returns the first device of this process, independent of `keras.device`."""
    return torch_device(list_devices()[0])


def abort_nccl() -> None:
    """Aborts the collectives of all groups."""
    # NCCL does not notice a dead process on the same machine. gloo does, and cannot be aborted.
    time.sleep(2.0)
    # Also abort the groups of a mesh. Otherwise, a collective in one of them waits for NCCL's timeout.
    found = [backend_of("cuda", group) for group in list(dist.distributed_c10d._world.pg_map)]
    backends = [backend for backend in found if backend is not None and backend.name() == "nccl"]
    # Abort them together, because a single abort may hang (https://github.com/pytorch/pytorch/issues/119797).
    if backends:
        backends[0]._group_start()
        for backend in reversed(backends):
            backend.abort()
        backends[0]._group_end()


def backend_of(kind: str, group: dist.ProcessGroup) -> Any:
    """Returns the PyTorch backend of a group for a kind of device, or `None`."""
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None
