"""Training as a `keras.distribution` says."""

from __future__ import annotations

from typing import Any

from kdist import gaps
from kdist.backends import get_backend
from kdist.cluster import ClusterResolver, discover
from kdist.communication.options import CommunicationOptions
from kdist.errors import InvalidArgumentError
from kdist.strategies.distributions import facts_of
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Mirrored, Sharded


class KerasDistributionStrategy(ShardedStrategy):
    """Trains as a `keras.distribution.DataParallel` or `ModelParallel` says, with all that strategies do.

    Uneven batches, several workers, callbacks, checkpoints and lost workers are as under the other strategies; Keras's
    own trainer has no part in it. Once this strategy is made, the distribution need not be set.

    Args:
        distribution: The distribution. Its devices are those of all workers, the devices of worker 0 first. On JAX
            Keras starts JAX to make it: CPU devices must be there before
            (`jax.config.update("jax_num_cpu_devices", 2)`), and with several workers
            `keras.distribution.initialize` or `jax.distributed.initialize` comes before it. On PyTorch devices are
            numbered over the workers: `["gpu:0", "gpu:1"]` for two of one GPU each.
        cluster_resolver: Says who the workers are; `None` to look at the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: It is another kind of distribution, or its devices are not those of the workers, in order.
        UnsupportedError: On the backend `keras.distribution` does nothing.

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
        distribution: Any,
        *,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        import keras

        backend = get_backend()
        gaps.require(type(self).__name__, backend.name)
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
