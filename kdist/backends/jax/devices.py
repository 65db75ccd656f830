"""The JAX devices of this process, and logical CPU devices on request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils

from kdist.backends.device_names import count_of_kind, missing_device, short_name, too_late
from kdist.backends.jax.watch import has_started
from kdist.cluster import environment, may_have_gpus

KINDS = ("gpu", "tpu", "cpu")

# Each CPU device blocks a thread of XLA's pool while it waits in a collective. The pool has one thread per
# core, so more devices than cores wait for each other until XLA aborts.
_POOL_THREADS = 16
_THREADS_PER_DEVICE = 4


def local_devices(kind: str) -> list[jax.Device]:
    """Starts JAX, and returns this process's device objects of a kind: `"cpu"`, `"gpu"` or `"tpu"`."""
    try:
        return list(jax.local_devices(backend=kind))
    except RuntimeError:  # JAX has no such platform here
        return []


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the names of local devices of a kind; `None` means accelerators, or CPUs if there are none."""
    for candidate in (kind,) if kind else KINDS:
        names = tuple(f"{candidate}:{i}" for i in range(len(local_devices(candidate))))
        if names:
            return names
    return ()


def request_cpus(devices: Sequence[str]) -> None:
    """Makes JAX provide the CPU devices in `devices` (short names), or raises an error if it has already started."""
    needed = count_of_kind(devices, "cpu")
    if needed < 2:
        return
    # XLA reads this when its CPU client starts. With fewer threads than concurrent collectives, it hangs.
    environment.set_default("PJRT_NPROC", max(_POOL_THREADS, _THREADS_PER_DEVICE * needed))
    if "xla_force_host_platform_device_count" in (environment.get("XLA_FLAGS") or ""):
        shown = len(local_devices("cpu"))  # an older option; JAX refuses both together
    else:
        shown = _show_cpus(needed)
    if shown < needed:
        raise too_late("JAX", needed, f'import jax; jax.config.update("jax_num_cpu_devices", {needed})')


def _show_cpus(needed: int) -> int:
    wanted = max(needed, jax.config.jax_num_cpu_devices)
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
        return wanted
    except RuntimeError:  # JAX has started, so the number is fixed
        return len(local_devices("cpu"))


def require_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns short names of devices after a check that they exist; see `Backend.require_devices`."""
    names = tuple(short_name(name) for name in devices)
    request_cpus(names)
    find_devices(names)
    return names


def own_devices(names: Sequence[str], num_workers: int) -> tuple[str, ...]:
    """Returns the short names of this process's devices in `names`, which have ids over all processes."""
    if num_workers == 1:
        request_cpus(names)  # Keras has started JAX; the error explains how to get more devices
    ids = {
        f"{device.platform}:{device.id}": f"{kind}:{index}"
        for kind in KINDS
        for index, device in enumerate(local_devices(kind))
    }
    return tuple(ids[name] for name in names if name in ids)


def find_devices(names: Sequence[str]) -> list[jax.Device]:
    """Returns JAX's device objects for short names, or raises a `DeviceError`."""
    found = []
    for name in names:
        kind, index = name.split(":")
        if kind == "gpu" and not has_started() and not may_have_gpus():
            raise missing_device(name, ["cpu:0"])  # JAX is not started, so CPUs can still be requested
        available = local_devices(kind)
        if int(index) >= len(available):
            raise missing_device(name, [other for k in KINDS for other in list_devices(k)])
        found.append(available[int(index)])
    return found


def along_links(names: Sequence[str], mesh_shape: Sequence[int]) -> tuple[str, ...]:
    """Sorts the TPU cores of this worker, so that a mesh over all workers uses their links efficiently.

    The order of the workers does not change. In this order, the hosts of a slice are neighbors, so the first
    axes of the mesh span the slower network.
    """
    devices = find_devices(names)
    left = len(devices)
    shape: list[int] = []
    for length in reversed(mesh_shape):
        shape.insert(0, math.gcd(left, length))
        left //= shape[0]
    try:
        mesh = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):  # JAX has no order for these devices
        return tuple(names)
    found = {id(device): name for device, name in zip(devices, names, strict=True)}
    return tuple(found[id(device)] for device in mesh.flat)
