"""`MultiWorkerMirroredStrategy`: synchronous training on several worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationImplementation, CommunicationOptions
from kdist.strategies.places import check_options, find_workers, join_workers
from kdist.strategies.strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Trains one model on several worker processes, each with one or more devices.

    Every worker runs the same script. The constructor waits until all workers have joined. Without a
    `cluster_resolver`, kdist detects the cluster from `TF_CONFIG`, torchrun, Slurm, MPI,
    `KERAS_DISTRIBUTION_*`, Kubernetes, SageMaker, a TPU slice and other sources. `kdist info` lists them in
    order of precedence. If no source describes a cluster, there is one worker.

    Args:
        cluster_resolver: The resolver of the cluster. By default, kdist reads the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.
        devices: The devices of this worker, one per replica; not in `tf.distribute`. All workers need the
            same number. By default, as many GPUs as the resolver sets in `num_accelerators` (0 means one
            CPU). If it sets no number, all visible GPUs, or one CPU.

    Raises:
        ClusterConfigError: If the cluster configuration is invalid.
        WorkerTimeoutError: If a worker does not join in time.
        DeviceError: If a device does not exist.

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
        topology, self._cluster_resolver = find_workers(cluster_resolver, devices)
        super().__init__(join_workers(topology, options))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the constructor or the environment. Defaults to `TFConfigClusterResolver`."""
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
