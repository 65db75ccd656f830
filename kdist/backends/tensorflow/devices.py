"""Devices of TensorFlow, and logical CPUs made on request."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.backends import device_names

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
        found = tf.config.list_logical_devices(kind) if _started() else tf.config.list_physical_devices(kind)
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
