"""TensorFlow's devices, and logical CPU devices that are created on request."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.backends import device_names
from kdist.cluster import Cluster, own_gpus
from kdist.errors import DeviceError

_ACCELERATORS = ("GPU", "TPU")


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the devices of a kind; for `None`, the accelerators, or the first CPU if there are none."""
    if kind is None:
        for accelerator in _ACCELERATORS:
            if names := list_devices(accelerator):
                return names
        return ("cpu:0",)
    kind = kind.upper()
    try:
        found = tf.config.list_logical_devices(kind) if _started() else tf.config.get_visible_devices(kind)
    except RuntimeError:
        found = []
    return tuple(f"{kind.lower()}:{i}" for i in range(len(found)))


def require_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Checks that the devices exist, and splits the CPU into logical devices if necessary.

    Source: https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration
    """
    names = tuple(device_names.short_name(name) for name in devices)
    _require_cpus(device_names.count_of_kind(names, "cpu"))
    for name in names:
        kind = name.split(":")[0]
        if kind != "cpu" and name not in list_devices(kind):
            raise device_names.missing_device(name, [*list_devices("cpu"), *list_devices()])
    return names


# The GPUs that the user named, after all others are hidden. TensorFlow then numbers them from 0.
_named: tuple[str, ...] = ()


def devices_of_worker(cluster: Cluster, named: Sequence[str]) -> tuple[str, ...]:
    """Hides the GPUs of other workers, and returns the names of this worker's devices in TensorFlow.

    Hiding is necessary because the native strategy uses the first visible GPUs.

    Args:
        cluster: The cluster of this worker.
        named: The user's short names. If empty, the worker uses its share of the machine's GPUs.

    Raises:
        DeviceError: If a GPU does not exist, or TensorFlow has started with other GPUs.
    """
    global _named
    if any(not name.startswith("gpu:") for name in named):
        return tuple(named) if named[0].startswith("cpu:") else require_devices(named)
    visible = tf.config.get_visible_devices("GPU")
    if named and _named:
        wanted = visible if tuple(named) == _named else []
    elif named:
        wanted = [visible[int(name.split(":")[1])] for name in require_devices(named)]
    elif visible == tf.config.list_physical_devices("GPU"):
        wanted = [visible[index] for index in own_gpus(cluster, len(visible))]
    else:  # the user or another strategy has already hidden some
        wanted = visible
    if wanted == visible:
        return list_devices()
    if not _started() and wanted:
        tf.config.set_visible_devices(wanted, "GPU")
        _named = tuple(named)
    elif not wanted or wanted != visible[: len(wanted)]:
        raise DeviceError(
            "Cannot use these GPUs: this process has already chosen other GPUs for TensorFlow.",
            received={"devices": tuple(named), "visible": [device.name for device in visible]},
            hint="Create one strategy at the start of the program, or set the GPU of each worker when you start it: "
            "CUDA_VISIBLE_DEVICES=1",
        )
    return tuple(f"gpu:{index}" for index in range(len(wanted)))


def _require_cpus(count: int) -> None:
    if count <= len(list_devices("cpu")):
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or ()
    if len(configured) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        call = f"kdist.MirroredStrategy([f'cpu:{{i}}' for i in range({count})])"
        raise device_names.too_late("TensorFlow", count, call) from error


def _started() -> bool:
    """Returns whether TensorFlow has created its devices. Their number is then fixed."""
    from tensorflow.python.eager import context

    # There is no public API for this: listing the logical devices would start the runtime.
    return context.context()._initialized
