"""`MirroredStrategy`: synchronous training on several devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.backends import get_backend
from kdist.communication.cross_device_ops import CrossDeviceOps, NcclAllReduce, is_own
from kdist.communication.options import hint_ignored
from kdist.errors import InvalidArgumentError
from kdist.strategies.places import choose_devices
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology


class MirroredStrategy(Strategy):
    """Trains one model on several devices of one machine, in one process.

    Every device holds a copy of the variables. Each global batch is split over the replicas, and their
    gradients are summed. The result matches training on a single device.

    On PyTorch, this gives no speedup, because the replicas of a process run one after another. Use
    `MultiWorkerMirroredStrategy` instead, and start one worker per GPU with `kdist run`.

    Args:
        devices: Names of the devices, for example `["gpu:0", "gpu:1"]`. By default, all GPUs or TPU cores, or
            the CPU if there are none. For `["cpu:0", "cpu:1"]`, the backend creates two logical CPU devices.
        cross_device_ops: How to reduce over the devices. Every backend calls a custom subclass. kdist's own
            classes are only hints outside TensorFlow. See `kdist.CrossDeviceOps`.

    Raises:
        DeviceError: If a device does not exist.
        InvalidArgumentError: If `devices` is empty or contains a device twice.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy

    Example:

    ```python
    strategy = kdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=128)   # 64 rows per replica
    ```
    """

    def __init__(
        self, devices: Sequence[str] | None = None, cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        backend = get_backend()
        names = choose_devices(backend, devices)
        _check_cross_device_ops(cross_device_ops)
        own, native = is_own(cross_device_ops), cross_device_ops
        if isinstance(native, NcclAllReduce) and not all(name.startswith("gpu:") for name in names):
            hint_ignored(f"cross_device_ops={native!r}", "NCCL needs NVIDIA GPUs.")
            native = None
        super().__init__(backend.create_runtime(Topology(names), None, None if own else native))
        self.cross_device_ops = cross_device_ops
        if own and len(names) > 1:
            self.own_ops = cross_device_ops


def _check_cross_device_ops(ops: CrossDeviceOps | None) -> None:
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        raise InvalidArgumentError(
            "`cross_device_ops` is not an instance of kdist.CrossDeviceOps.",
            received={"cross_device_ops": ops},
            hint="Pass an instance, for example cross_device_ops=kdist.ReductionToOneDevice()",
        )
