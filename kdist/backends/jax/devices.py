"""The devices of this process as JAX sees them, and logical CPU devices on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils

from kdist.backends.device_names import count_of_kind, missing_device, short_name, too_late
from kdist.backends.jax.watch import has_started
from kdist.cluster import environment, may_have_gpus

KINDS = ("gpu", "tpu", "cpu")

# Each CPU device of a process blocks a thread of XLA's pool while it waits in a collective, and the pool has
# only as many threads as there are cores: more devices than cores wait for each other until XLA aborts.
_POOL_THREADS = 16
_THREADS_PER_DEVICE = 4


def local_devices(kind: str) -> list[Any]:
    """Returns JAX's device objects of a kind (`"cpu"`, `"gpu"`, `"tpu"`) in this process; starts JAX's backends."""
    try:
        return list(jax.local_devices(backend=kind))
    except RuntimeError:  # JAX's way to say that it knows no such platform here
        return []


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the names of the local devices of a kind; `None` for accelerators, else the CPU devices."""
    for candidate in (kind,) if kind else KINDS:
        names = tuple(f"{candidate}:{i}" for i in range(len(local_devices(candidate))))
        if names:
            return names
    return ()


def request_cpus(devices: Sequence[str]) -> None:
    """Asks JAX to show the CPU devices that the short names `devices` need, without starting it.

    Raises:
        DeviceError: JAX has started already, with fewer CPU devices.
    """
    needed = count_of_kind(devices, "cpu")
    if needed < 2:
        return
    # Read by XLA when its CPU client starts; with fewer threads than collectives in flight, they wait for each other.
    environment.set_default("PJRT_NPROC", max(_POOL_THREADS, _THREADS_PER_DEVICE * needed))
    if "xla_force_host_platform_device_count" in (environment.get("XLA_FLAGS") or ""):
        shown = len(local_devices("cpu"))  # the older way to ask; JAX refuses both at once
    else:
        shown = _show_cpus(needed)
    if shown < needed:
        raise too_late("JAX", needed, f'jax.config.update("jax_num_cpu_devices", {needed})')


def _show_cpus(needed: int) -> int:
    wanted = max(needed, jax.config.jax_num_cpu_devices)
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
        return wanted
    except RuntimeError:  # JAX's backends have started: it shows what it shows
        return len(local_devices("cpu"))


def require_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Makes sure that the devices exist; see `Backend.require_devices`."""
    names = tuple(short_name(name) for name in devices)
    request_cpus(names)
    find_devices(names)
    return names


def own_devices(names: Sequence[str], num_workers: int) -> tuple[str, ...]:
    """Returns the short names of those devices, named by their ids over all processes, that this process has."""
    if num_workers == 1:
        request_cpus(names)  # Keras has started JAX: where there are too few, this says how to have more
    ids = {
        f"{device.platform}:{device.id}": f"{kind}:{index}"
        for kind in KINDS
        for index, device in enumerate(local_devices(kind))
    }
    return tuple(ids[name] for name in names if name in ids)


def find_devices(names: Sequence[str]) -> list[Any]:
    """Returns JAX's device objects for short names, or raises a `DeviceError`."""
    found = []
    for name in names:
        kind, index = name.split(":")
        if kind == "gpu" and not has_started() and not may_have_gpus():
            raise missing_device(name, ["cpu:0"])  # JAX is not started: CPU devices can still be asked for
        available = local_devices(kind)
        if int(index) >= len(available):
            raise missing_device(name, [other for k in KINDS for other in list_devices(k)])
        found.append(available[int(index)])
    return found


def along_links(names: Sequence[str], mesh_shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the TPU cores of this worker in the order in which a mesh uses their links best.

    Only this worker's own devices change places. The mesh keeps the order of the workers, in which the hosts of a slice
    are neighbors, so its first axes span the slower network.

    Args:
        names: The short names of TPU cores.
        mesh_shape: The lengths of the axes of the mesh over all workers.
    """
    devices = find_devices(names)
    left = len(devices)
    shape: list[int] = []
    for length in reversed(mesh_shape):
        shape.insert(0, math.gcd(left, length))
        left //= shape[0]
    try:
        mesh = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):  # for some devices, JAX has no order
        return tuple(names)
    found = {id(device): name for device, name in zip(devices, names, strict=True)}
    return tuple(found[id(device)] for device in mesh.flat)
