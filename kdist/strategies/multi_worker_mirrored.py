"""Synchronous training on several worker processes, on one machine or many."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.backends import get_backend
from kdist.cluster import ClusterResolver, TFConfigClusterResolver
from kdist.communication.options import CommunicationImplementation, CommunicationOptions
from kdist.strategies.places import check_options, find_workers
from kdist.strategies.strategy import Strategy
from kdist.topology import Topology


class MultiWorkerMirroredStrategy(Strategy):
    """Trains one model on several worker processes, each with one or more devices.

    Every worker runs the same script. Who the workers are comes from `cluster_resolver`, else from `TF_CONFIG`,
    torchrun's variables, Slurm, MPI, `KERAS_DISTRIBUTION_*`, Kubernetes, SageMaker or a TPU slice, in the order of
    `kdist info`; where none of them says anything, there is one worker. Construction blocks until all workers have
    come.

    Args:
        cluster_resolver: Says who the workers are; `None` to look at the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.
        devices: Beyond `tf.distribute`: names of the devices of this worker, one a replica, as many on every
            worker. `None` for as many GPUs as `cluster_resolver.num_accelerators()` was told (0 means one CPU), else
            for all GPUs that the worker sees, or one CPU.

    Raises:
        ClusterConfigError: The description of the cluster is wrong.
        WorkerTimeoutError: A worker did not come in time.
        DeviceError: A device is not there.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy

    Example:

    ```python
    strategy = kdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=128)   # the global batch, over all workers
    ```
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | None = None,
    ) -> None:
        options = check_options(communication_options)
        cluster, names = find_workers(cluster_resolver, devices)
        self._cluster_resolver = cluster.resolver or TFConfigClusterResolver()
        topology = Topology(names, cluster if cluster.num_workers > 1 else None)
        super().__init__(get_backend().create_runtime(topology, options))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver given at construction, else that of the environment: of `TF_CONFIG` where nothing is set."""
        return self._cluster_resolver


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with the older signature of `tf.distribute.experimental`.

    Args:
        communication: A `CommunicationImplementation` or its name.
        cluster_resolver: As in `MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
