"""`ModelParallelStrategy`: a layout map shards the layers over a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.strategies.layouts import check_axis, read_layouts
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Layout, Sharded

if TYPE_CHECKING:
    import keras


class ModelParallelStrategy(ShardedStrategy):
    """Trains one model with its variables sharded over the axes of a device mesh, by a layout map.

    The devices of all workers form the mesh. It starts with the devices of worker 0, and its last axis varies
    fastest. Rows are split over the axis `batch_dim_name`. Along the other axes, devices share the work of a
    layer. Results match one device. If a variable is sharded over workers, all must read it together.

    Args:
        layout_map: A `keras.distribution.LayoutMap`; a mapping; or a function of a variable's path and shape
            that returns its layout. A layout is a tuple with a mesh axis or `None` per axis of the variable.
            A mapping has layouts as values and regular expressions for whole variable paths as keys.
            Unmatched variables are not sharded. As in Keras, a layer's path with the suffix "/output" sets
            its output's layout.
        batch_dim_name: The axis of the mesh over which rows are split. By default, the first axis.
        mesh: The name and length of each mesh axis. A `LayoutMap` has its own mesh.
        devices: The devices of this worker. All workers need the same number. By default, all GPUs or TPU
            cores. If there are none and there is one worker, as many CPU devices as the mesh needs.
        cluster_resolver: The resolver of the cluster. By default, kdist reads the environment.
        communication_options: A `kdist.experimental.CommunicationOptions`.

    Raises:
        InvalidArgumentError: If an axis is not in the mesh, or the mesh does not fit the number of
            devices. In the scope, if a layout does not fit its variable.
        UnsupportedError: If the backend cannot shard variables, or not over the devices of one process.

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
        layout_map: keras.distribution.LayoutMap
        | Mapping[str, Layout]
        | Callable[[str, tuple[int, ...]], Layout]
        | None = None,
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
