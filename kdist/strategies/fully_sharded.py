"""`FullyShardedStrategy`: weights, gradients and optimizer state are sharded over all replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.errors import check_whole
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Layout, Sharded

_AXIS = "replica"


class FullyShardedStrategy(ShardedStrategy):
    """Trains one model with its variables sharded over all replicas, as in FSDP and ZeRO stage 3.

    Each replica holds a shard of every large variable, and a layer's weights are gathered only when needed.
    Gradients and optimizer state stay sharded. With N replicas, each needs about 1/N of the memory of
    `MirroredStrategy`. Results match one device. If N divides no axis of a variable, kdist pads the largest axis.

    kdist detects the workers as in `MultiWorkerMirroredStrategy`. Without a cluster, it uses the devices of
    this process. Reading a variable gathers it, so with several workers all workers must read it together.

    Args:
        devices: The devices of this worker, one per replica. All workers need the same number. By default,
            all GPUs or TPU cores, or one CPU.
        min_size: Variables with fewer elements stay whole, because gathering them costs more than it saves.
        cluster_resolver: The resolver of the cluster. By default, kdist reads the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: If `min_size` is not a non-negative integer.
        UnsupportedError: If the backend cannot shard variables, or not over the devices of one process.
        DeviceError: If a device does not exist.
        WorkerTimeoutError: If a worker does not join in time.

    Source: ZeRO, https://arxiv.org/abs/1910.02054; PyTorch FSDP, https://arxiv.org/abs/2304.11277

    Example:

    ```python
    strategy = kdist.FullyShardedStrategy()
    with strategy.scope():
        model = make_a_large_model()
        model.compile(loss="mse", optimizer="adam")
    model.fit(x, y, batch_size=128)   # the global batch
    ```
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        min_size: int = 1024,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        hint = "Pass a number of elements: kdist.FullyShardedStrategy(min_size=1024)"
        check_whole("min_size", min_size, hint, least=0)
        layout = functools.partial(along_largest_axis, min_size=min_size)
        storage = Sharded({_AXIS: None}, _AXIS, layout)
        super().__init__(storage, devices, cluster_resolver, communication_options)


def along_largest_axis(
    path: str, shape: tuple[int, ...], lengths: Mapping[str, int], min_size: int = 0
) -> Layout:
    """Shards the largest axis that the number of replicas divides, or else the largest axis, which is padded.

    Example:

    >>> from kdist.strategies.fully_sharded import along_largest_axis
    >>> along_largest_axis("dense/kernel", (3, 8), {"replica": 4})
    (None, 'replica')
    >>> along_largest_axis("embedding/embeddings", (50257, 3), {"replica": 4})
    ('replica', None)
    >>> along_largest_axis("dense/bias", (6,), {"replica": 4}, min_size=1024)
    (None,)
    """
    axes = range(len(shape)) if math.prod(shape) >= max(min_size, 1) else []
    chosen = max(axes, key=lambda axis: (shape[axis] % lengths[_AXIS] == 0, shape[axis]), default=None)
    return tuple(_AXIS if axis == chosen else None for axis in range(len(shape)))
