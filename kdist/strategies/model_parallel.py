"""Synchronous training with layers that are divided over devices, as a layout map says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.strategies.layouts import check_axis, read_layouts
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Sharded


class ModelParallelStrategy(ShardedStrategy):
    """Trains one model whose variables are divided over the axes of a mesh of devices, as a layout map says.

    The devices of all workers form the mesh, those of worker 0 first and the last axis fastest. Rows are divided
    over the axis `batch_dim_name`; along the other axes devices share the work of a layer. Results are those of one
    device. Reading the value of a variable that is divided over workers gathers it: all workers must do so.

    Args:
        layout_map: A `keras.distribution.LayoutMap`, or a mapping of regular expressions, which match whole paths
            of variables, to tuples that name for each axis of the variable an axis of the mesh, or `None`. A
            variable that no expression finds is whole on every device. Or a function, called with the path and the
            shape of each variable, that returns such a tuple. As with Keras, a path of a layer with "/output" at its
            end stands for what the layer returns.
        batch_dim_name: The axis of the mesh over which rows are divided; by default the first.
        mesh: Names and lengths of the axes of the mesh, for a mapping; a `LayoutMap` has its own.
        devices: Names of the devices of this worker, as many on every worker. `None` for all GPUs (or TPU cores), or
            as many CPUs as the mesh has places where there is one worker.
        cluster_resolver: Says who the workers are; `None` to look at the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: An axis is not in the mesh, or the mesh has another number of places than there are
            devices; in the scope, a layout that does not divide a variable.
        UnsupportedError: The backend cannot divide variables, or not over devices of one process.

    Source: https://keras.io/api/distribution/model_parallel/

    Example:

    ```python
    strategy = kdist.ModelParallelStrategy(
        {".*dense.*/kernel": (None, "model"), ".*dense.*/bias": ("model",)},
        mesh={"batch": 1, "model": 2},
    )
    ```
    """

    def __init__(
        self,
        layout_map: Any = None,
        batch_dim_name: str | None = None,
        *,
        mesh: Mapping[str, int] | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        axes, layout = read_layouts(layout_map, mesh)
        batch_axis = batch_dim_name or next(iter(axes))
        check_axis(batch_axis, axes)
        storage = Sharded(axes, batch_axis, layout)
        super().__init__(storage, devices, cluster_resolver, communication_options)
