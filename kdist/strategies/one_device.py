"""`OneDeviceStrategy`: all variables and all computation on one device."""

from __future__ import annotations

from kdist.backends import get_backend
from kdist.errors import InvalidArgumentError
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology


class OneDeviceStrategy(Strategy):
    """Places variables and computation on a single device.

    Use it to test a script before you distribute it.

    Args:
        device: Name of the device, for example `"cpu:0"` or `"/gpu:0"`.

    Raises:
        DeviceError: If the device does not exist.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy

    Example:

    ```python
    strategy = kdist.OneDeviceStrategy("cpu:0")
    ```
    """

    def __init__(self, device: str) -> None:
        if not isinstance(device, str) or not device:
            raise InvalidArgumentError(
                "`device` is not the name of a device.",
                received={"device": device},
                hint='Pass the name of one device: kdist.OneDeviceStrategy("cpu:0")',
            )
        backend = get_backend()
        devices = backend.require_devices([device])
        super().__init__(backend.create_runtime(Topology(devices)))
