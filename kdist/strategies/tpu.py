"""`TPUStrategy`: synchronous training on the TPUs of a host, a slice or several slices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kdist import unsupported
from kdist.arrays.types import T
from kdist.backends import get_backend
from kdist.cluster import ClusterResolver
from kdist.cluster.tpu import TPUClusterResolver
from kdist.errors import DeviceError, InvalidArgumentError
from kdist.strategies.places import find_workers
from kdist.strategies.strategy import Strategy

_ONE_DEVICE = "TPUStrategy cannot split a replica over several devices."
_DIVIDE = "To shard a model over devices, use kdist.ModelParallelStrategy or kdist.FullyShardedStrategy."


class TPUStrategy(Strategy):
    """Trains one model on all TPU devices of this host's slices, with one replica per device.

    Run the same script on every host. The resolver returns the hosts, and the chief is the first host of the
    first slice. The constructor waits until all hosts have joined.

    Args:
        tpu_cluster_resolver: A `kdist.cluster_resolver.TPUClusterResolver`. By default, a resolver
            without arguments.
        experimental_device_assignment: Must be `None`, because each replica has one device.
        experimental_spmd_xla_partitioning: Ignored. On JAX, XLA always partitions a step.
        devices: The devices of this host; not in `tf.distribute`. All hosts need the same number. By default,
            all TPUs. Pass `["cpu:0", "cpu:1"]` to try a script without a TPU.

    Raises:
        ClusterConfigError: If there is no TPU, or its configuration is invalid.
        ClusterRuntimeError: If the metadata server does not answer.
        DeviceError: If the backend does not find a TPU.
        UnsupportedError: If the backend does not support TPUs.

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
        experimental_device_assignment: object = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        devices: Sequence[str] | None = None,
    ) -> None:
        backend = get_backend()
        unsupported.check("TPUStrategy", backend.name)
        if experimental_device_assignment is not None:
            raise InvalidArgumentError(
                "TPUStrategy does not support a device assignment: each replica has one device.",
                received={"device_assignment": experimental_device_assignment},
                hint="Remove the device assignment. " + _DIVIDE,
            )
        resolver = tpu_cluster_resolver or TPUClusterResolver()
        topology, self._cluster_resolver = find_workers(resolver, devices)
        super().__init__(backend.create_runtime(topology))
        if devices is None and not self.runtime.devices[0].startswith("tpu:"):
            raise DeviceError(
                "TPUStrategy found no TPU on this machine.",
                received={"devices": self.runtime.devices},
                hint="Install the TPU version of JAX: pip install 'jax[tpu]'",
            )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that was passed to the constructor, or the default resolver."""
        return self._cluster_resolver

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Returns the tensor unchanged, because a replica has one logical device.

        Args:
            tensor: A tensor.
            logical_device_id: Must be 0.

        Raises:
            InvalidArgumentError: If `logical_device_id` is not 0.
        """
        return self._on_one_device(tensor, "logical_device_id", logical_device_id, logical_device_id == 0)

    def experimental_split_to_logical_devices(self, tensor: T, partition_dimensions: Sequence[int]) -> T:
        """Returns the tensor unchanged, because a replica has one logical device.

        Args:
            tensor: A tensor.
            partition_dimensions: The number of parts per axis of the tensor. All must be 1.

        Raises:
            InvalidArgumentError: If the tensor would be split.
        """
        whole = math.prod(partition_dimensions) == 1
        return self._on_one_device(tensor, "partition_dimensions", partition_dimensions, whole)

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Returns the tensor unchanged, because a replica has one logical device.

        Args:
            tensor: A tensor.
        """
        return tensor

    def _on_one_device(self, tensor: T, argument: str, value: object, fits: bool) -> T:
        if fits:
            return tensor
        raise InvalidArgumentError(_ONE_DEVICE, received={argument: value}, hint=_DIVIDE)


class ExperimentalTPUStrategy(TPUStrategy):
    """`TPUStrategy` with the older signature of `tf.distribute.experimental`.

    Args:
        tpu_cluster_resolver: As in `TPUStrategy`.
        device_assignment: Must be `None`, because each replica has one device.
    """

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: object = None
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


ExperimentalTPUStrategy.__name__ = "TPUStrategy"
