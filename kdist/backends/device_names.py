"""Converts device names from all common spellings to the short form that kdist uses."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdist.errors import DeviceError

_NAME = re.compile(
    r"(?:/job:[^/]*)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu|tpu|cuda)(?::(\d+))?", re.I
)


def short_name(name: str) -> str:
    """Returns the short form of a device name such as `"/gpu:1"`, `"cuda:0"`, `"GPU"` or a TensorFlow name.

    Example:

    >>> from kdist.backends.device_names import short_name
    >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1")
    'gpu:1'
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DeviceError(
            f"{name!r} is not the name of a device.",
            received={"device": name},
            hint='Use a kind (cpu, gpu, tpu) and an index, for example "cpu:0" or "gpu:1".',
        )
    kind, index = match.groups()
    kind = kind.lower().replace("cuda", "gpu")
    return f"{kind}:{int(index or 0)}"


def count_of_kind(names: Sequence[str], kind: str) -> int:
    """Returns how many devices of a kind must exist for all the short `names` to exist."""
    indices = [int(name.split(":")[1]) for name in names if name.startswith(f"{kind}:")]
    return max(indices) + 1 if indices else 0


def missing_device(name: str, available: Sequence[str]) -> DeviceError:
    return DeviceError(
        f"The device {name!r} does not exist on this machine.",
        received={"device": name},
        hint=f"Choose from the available devices: {', '.join(dict.fromkeys(available)) or 'none'}.",
    )


def too_late(name: str, how_many: int, call: str) -> DeviceError:
    """Returns the error for logical CPU devices that can no longer be created."""
    return DeviceError(
        f"Cannot create logical CPU devices: {name} has already started.",
        received={"cpu_devices_needed": how_many},
        hint=f"Create the strategy at the start of the program, or begin the program with:\n{call}",
    )
