"""Synchronous training on the TPUs of a host, of a slice or of several slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kdist import gaps
from kdist.backends import get_backend
from kdist.cluster import ClusterResolver, TPUClusterResolver
from kdist.errors import DeviceError, InvalidArgumentError
from kdist.strategies.places import find_workers
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology

_ONE_DEVICE = "TPUStrategy cannot split a replica over several devices."
_DIVIDE = "To shard a model over devices, use kdist.ModelParallelStrategy or kdist.FullyShardedStrategy."


class TPUStrategy(Strategy):
    """Trains one model on all TPU devices of the slices that this host belongs to: a replica each.

    The same script runs on every host. Who the hosts are is asked of the resolver: the chief is the first host of the
    first slice. Construction blocks until all have come.

    Args:
        tpu_cluster_resolver: A `kdist.cluster_resolver.TPUClusterResolver`; `None` for one without arguments.
        experimental_device_assignment: `None`: a replica is one device.
        experimental_spmd_xla_partitioning: Accepted as `tf.distribute` does: on JAX a step always is one program that
            XLA divides.
        devices: Beyond `tf.distribute`: names of the devices of this host, as many on every host; `None` for all
            its TPUs. With `["cpu:0", "cpu:1"]` a script can be tried where no TPU is.

    Raises:
        ClusterConfigError: There is no TPU, or what describes it is wrong.
        ClusterRuntimeError: The metadata server does not answer.
        DeviceError: The backend sees no TPU.
        UnsupportedError: The backend has no TPUs.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy

    Example:

    ```python
    strategy = kdist.TPUStrategy(kdist.cluster_resolver.TPUClusterResolver())
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=1024)   # the global batch, over all hosts
    ```
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        devices: Sequence[str] | None = None,
    ) -> None:
        backend = get_backend()
        gaps.require("TPUStrategy", backend.name)
        if experimental_device_assignment is not None:
            raise InvalidArgumentError(
                "TPUStrategy does not support a device assignment: each replica has one device.",
                received={"device_assignment": experimental_device_assignment},
                hint="Remove the device assignment. " + _DIVIDE,
            )
        self._cluster_resolver = tpu_cluster_resolver or TPUClusterResolver()
        cluster, names = find_workers(self._cluster_resolver, devices)
        topology = Topology(names, cluster if cluster.num_workers > 1 else None)
        super().__init__(backend.create_runtime(topology))
        if devices is None and not self.runtime.devices[0].startswith("tpu:"):
            raise DeviceError(
                "TPUStrategy found no TPU on this machine.",
                received={"devices": self.runtime.devices},
                hint="Install the TPU version of JAX: pip install 'jax[tpu]'",
            )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver given at construction, or the one that was made."""
        return self._cluster_resolver

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Returns the tensor: a replica has one logical device.

        Args:
            tensor: A tensor.
            logical_device_id: 0.

        Raises:
            InvalidArgumentError: It is another one.
        """
        return self._on_one_device(tensor, "logical_device_id", logical_device_id, logical_device_id == 0)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Returns the tensor: a replica has one logical device.

        Args:
            tensor: A tensor.
            partition_dimensions: For each axis of the tensor 1.

        Raises:
            InvalidArgumentError: The tensor would be divided.
        """
        whole = math.prod(partition_dimensions) == 1
        return self._on_one_device(tensor, "partition_dimensions", partition_dimensions, whole)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Returns the tensor: a replica has one logical device.

        Args:
            tensor: A tensor.
        """
        return tensor

    def _on_one_device(self, tensor: Any, argument: str, value: Any, fits: bool) -> Any:
        if fits:
            return tensor
        raise InvalidArgumentError(_ONE_DEVICE, received={argument: value}, hint=_DIVIDE)


class ExperimentalTPUStrategy(TPUStrategy):
    """`TPUStrategy` with the older signature of `tf.distribute.experimental`.

    Args:
        tpu_cluster_resolver: As in `TPUStrategy`.
        device_assignment: `None`: a replica is one device.
    """

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: Any = None
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


ExperimentalTPUStrategy.__name__ = "TPUStrategy"
