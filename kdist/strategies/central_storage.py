"""`CentralStorageStrategy`: synchronous training on several devices, with all variables on one device."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.backends import get_backend
from kdist.errors import InvalidArgumentError
from kdist.strategies.description import Description
from kdist.strategies.places import choose_devices
from kdist.strategies.strategy import Strategy
from kdist.topology import Central, Topology


class CentralStorageStrategy(Strategy):
    """Trains one model on several devices of one machine, with all variables on one device, usually the CPU.

    Each replica computes its part of a global batch with copies of the weights. The summed gradients update
    the variables on their device, and only this device holds the optimizer's variables. However, a step of
    `fit` on JAX is one program, and all variables are copied to its devices while it runs.

    Args:
        compute_devices: Names of the replicas' devices, for example `["gpu:0", "gpu:1"]`. By default, all
            GPUs, or the CPU if there are none.
        parameter_device: Name of the device that holds the variables. By default, the
            GPU if it is the only compute device, otherwise the CPU.

    Raises:
        DeviceError: If a device does not exist.
        InvalidArgumentError: If `compute_devices` is empty or has duplicates, or a name is not a string.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CentralStorageStrategy

    Example:

    ```python
    strategy = kdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="adam")
    model.fit(x, y, batch_size=128)   # 64 rows per replica
    ```
    """

    _told = Description(namespace="kdist.experimental")

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None
    ) -> None:
        if parameter_device is not None and not (isinstance(parameter_device, str) and parameter_device):
            raise InvalidArgumentError(
                "parameter_device is not the name of a device.",
                received={"parameter_device": parameter_device},
                hint='Pass the name of one device, for example parameter_device="cpu:0"',
            )
        backend = get_backend()
        names = choose_devices(backend, compute_devices, "compute_devices")
        only_gpu = len(names) == 1 and names[0].startswith("gpu:")
        (holder,) = backend.require_devices([parameter_device or (names[0] if only_gpu else "cpu:0")])
        super().__init__(backend.create_runtime(Topology(names, storage=Central(holder))))
