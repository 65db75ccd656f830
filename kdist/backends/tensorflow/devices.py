"""Devices of TensorFlow, and logical CPUs made on request."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.backends import device_names
from kdist.cluster import Cluster, own_gpus
from kdist.errors import DeviceError

_ACCELERATORS = ("GPU", "TPU")


def list_devices(kind: str | None = None) -> tuple[str, ...]:
    """Returns the devices of this process; accelerators, or the first CPU, where `kind` is `None`."""
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
    """Makes sure that the devices exist, splitting the CPU into logical devices where needed.

    Source: https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration
    """
    names = tuple(device_names.short_name(name) for name in devices)
    _require_cpus(device_names.count_of_kind(names, "cpu"))
    for name in names:
        kind = name.split(":")[0]
        if kind != "cpu" and name not in list_devices(kind):
            raise device_names.missing_device(name, [*list_devices("cpu"), *list_devices()])
    return names


# The GPUs that the user has named, once they are all that TensorFlow sees: it counts them from 0.
_named: tuple[str, ...] = ()


def devices_of_worker(cluster: Cluster, named: Sequence[str]) -> tuple[str, ...]:
    """Hides the GPUs that do not belong to this worker; returns its devices, by the names that TensorFlow has for them.

    The native strategy takes the first GPUs that it sees, whatever their names.

    Args:
        cluster: The cluster of this worker.
        named: The short names that the user has given; empty for the worker's part of the machine's GPUs.

    Raises:
        DeviceError: A GPU is not there, or TensorFlow has started with others.
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
    else:  # the user, or another strategy, has hidden some
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
    """Whether TensorFlow has made its devices: then their number is fixed."""
    from tensorflow.python.eager import context

    # The public API has no such question: asking for logical devices would start the runtime.
    return context.context()._initialized
