"""`KerasDistributionStrategy`: training with a distribution of Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist import unsupported
from kdist.backends import get_backend
from kdist.cluster import ClusterResolver, discover
from kdist.communication.options import CommunicationOptions
from kdist.errors import InvalidArgumentError
from kdist.strategies.distributions import facts_of
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Mirrored, Sharded

if TYPE_CHECKING:
    import keras


class KerasDistributionStrategy(ShardedStrategy):
    """Trains as a `keras.distribution.DataParallel` or `ModelParallel` does, with all features of strategies.

    kdist handles uneven batches, several workers, callbacks, checkpoints and lost workers as under the other
    strategies. It replaces Keras's distributed trainer, so you do not need to set the distribution.

    Args:
        distribution: The distribution. Its devices are the devices of all workers, starting with worker 0. On
            JAX, creating a distribution initializes JAX. Configure CPU devices first, with
            `jax.config.update("jax_num_cpu_devices", 2)`. With several workers, also call
            `keras.distribution.initialize` or `jax.distributed.initialize` first. On PyTorch, devices are
            numbered across workers: `["gpu:0", "gpu:1"]` means two workers with one GPU each.
        cluster_resolver: The resolver of the cluster. By default, kdist reads the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: If it has another type, or its devices are not the workers' devices in order.
        UnsupportedError: If the backend ignores `keras.distribution`.

    Source: https://keras.io/api/distribution/

    Example:

    ```python
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    strategy = kdist.KerasDistributionStrategy(distribution)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=128)   # the global batch
    ```
    """

    def __init__(
        self,
        distribution: keras.distribution.Distribution,
        *,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        import keras

        backend = get_backend()
        unsupported.check(type(self).__name__, backend.name)
        kinds = (keras.distribution.DataParallel, keras.distribution.ModelParallel)
        if not isinstance(distribution, kinds):
            raise InvalidArgumentError(
                "`distribution` is not a keras.distribution.DataParallel or ModelParallel.",
                received={"distribution": distribution},
                hint="Pass a distribution: kdist.KerasDistributionStrategy(keras.distribution.DataParallel())",
            )
        names, axes, batch_axis, layout = facts_of(distribution)
        storage = Mirrored() if axes is None else Sharded(axes, batch_axis, layout)
        own = backend.own_devices(names, discover(cluster_resolver).num_workers)
        super().__init__(storage, own or None, cluster_resolver, communication_options)
        if self.runtime.all_devices != names:
            raise InvalidArgumentError(
                "The devices of the distribution are not the devices of all workers, in the order of the workers.",
                received={"distribution": names, "workers": self.runtime.all_devices},
                hint="Create its mesh without `devices`, or start the number of workers that the mesh needs.",
            )
