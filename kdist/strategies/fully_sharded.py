"""Synchronous training with weights, gradients and optimizer state divided over all replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.errors import InvalidArgumentError
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Layout, Sharded

_AXIS = "replica"


class FullyShardedStrategy(ShardedStrategy):
    """Trains one model whose variables are divided over all replicas: each holds a part of every large one.

    Weights are gathered where they are needed, gradients and the optimizer's state stay divided: with N replicas
    each holds about one Nth of the memory of `MirroredStrategy`. Results are those of one device. If N divides no axis
    of a variable, its largest axis is padded where it is stored.

    Who the workers are is found as in `MultiWorkerMirroredStrategy`; where nothing describes a cluster, the devices
    are those of this process. Reading a variable's value gathers it: with several workers all must do so.

    Args:
        devices: Names of the devices of this worker, a replica each, as many on every worker. `None` for all GPUs
            (or TPU cores), or one CPU.
        min_size: How many elements a variable must have to be divided: to gather a small one costs more than it frees.
        cluster_resolver: Says who the workers are; `None` to look at the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: `min_size` is no number of elements.
        UnsupportedError: The backend cannot divide variables, or not over devices of one process.
        DeviceError: A device is not there.
        WorkerTimeoutError: A worker did not come in time.

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
        if not isinstance(min_size, int) or min_size < 0:
            raise InvalidArgumentError(
                "`min_size` is not a non-negative integer.",
                received={"min_size": min_size},
                hint="Pass a number of elements: kdist.FullyShardedStrategy(min_size=1024)",
            )
        layout = functools.partial(along_largest_axis, min_size=min_size)
        storage = Sharded({_AXIS: None}, _AXIS, layout)
        super().__init__(storage, devices, cluster_resolver, communication_options)


def along_largest_axis(
    path: str, shape: tuple[int, ...], lengths: Mapping[str, int], min_size: int = 0
) -> Layout:
    """Divides a variable along the largest axis that the replicas divide, else along the largest, which is padded.

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
