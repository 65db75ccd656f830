"""Synchronous training with layers that are divided over devices, as a layout map says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.cluster import ClusterResolver
from kdist.communication.options import CommunicationOptions
from kdist.errors import InvalidArgumentError
from kdist.strategies.sharded import ShardedStrategy
from kdist.topology import Layout, Sharded

_EXAMPLE = 'kdist.ModelParallelStrategy({".*dense.*/kernel": (None, "model")}, mesh={"batch": 2, "model": 2})'


class ModelParallelStrategy(ShardedStrategy):
    """Trains one model whose variables are divided over the axes of a mesh of devices, as a layout map says.

    The devices of all workers form the mesh, those of worker 0 first and the last axis fastest. Rows are divided
    over the axis `batch_dim_name`; along the other axes devices share the work of a layer. Results are those of one
    device. Reading the value of a variable that is divided over workers gathers it: all workers must do so.

    Args:
        layout_map: A `keras.distribution.LayoutMap`, or a mapping of regular expressions, searched for in the paths
            of variables, to tuples that name for each axis of the variable an axis of the mesh, or `None`. A
            variable that no expression finds is whole on every device.
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
        mesh={"batch": 2, "model": 2},
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
        axes, layouts = _read(layout_map, mesh)
        batch_axis = batch_dim_name or next(iter(axes))
        known = {name for layout in layouts.values() for name in layout} - {None}
        for name in (batch_axis, *sorted(map(str, known))):
            if name not in axes:
                raise InvalidArgumentError(
                    "batch_dim_name and layouts must name axes of the mesh.",
                    received={"axis": name, "mesh": axes},
                    hint=_EXAMPLE,
                )
        storage = Sharded(axes, batch_axis, LayoutRules(layouts))
        super().__init__(storage, devices, cluster_resolver, communication_options)


class LayoutRules:
    """Finds the layout of a variable by its path; notes which rules have found one."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts = {re.compile(pattern): layout for pattern, layout in layouts.items()}
        self.unused = set(layouts)

    def __call__(self, path: str, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Layout:
        """Returns the layout of a variable.

        Raises:
            InvalidArgumentError: It does not divide the variable.
        """
        found = {
            p.pattern: layout for p, layout in self._layouts.items() if p.pattern == path or p.search(path)
        }
        exact = {path: found[path]} if path in found else found
        if len(exact) > 1:
            raise InvalidArgumentError(
                "Only one layout may be for a variable.", received={"path": path, "layouts": exact}
            )
        if not exact:
            return (None,) * len(shape)
        ((pattern, layout),) = exact.items()
        self.unused.discard(pattern)
        fits = len(layout) == len(shape) and all(
            name is None or length % lengths[name] == 0 for name, length in zip(layout, shape, strict=True)
        )
        if not fits or len({*filter(None, layout)}) != len([*filter(None, layout)]):
            raise InvalidArgumentError(
                "A layout names for each axis of its variables another axis of the mesh, whose length divides it, "
                "or None.",
                received={"path": path, "shape": shape, "layout": layout, "mesh": dict(lengths)},
                hint=f'For example: {{"{pattern}": {(None,) * len(shape)}}}',
            )
        return layout


def _read(layout_map: Any, mesh: Mapping[str, int] | None) -> tuple[dict[str, int], dict[str, Layout]]:
    """Returns the axes of the mesh and the layouts, of Keras's objects or of plain ones."""
    device_mesh = getattr(layout_map, "device_mesh", None)
    if device_mesh is not None and mesh is None:
        mesh = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    if not isinstance(layout_map, Mapping) or not isinstance(mesh, Mapping) or not mesh:
        raise InvalidArgumentError(
            "layout_map must be a keras.distribution.LayoutMap with its device mesh, or a mapping beside `mesh`.",
            received={"layout_map": layout_map, "mesh": mesh},
            hint=_EXAMPLE,
        )
    for name, length in mesh.items():
        if not isinstance(name, str) or not isinstance(length, int) or length < 1:
            raise InvalidArgumentError(
                "mesh must have names and positive lengths.", received={"mesh": dict(mesh)}, hint=_EXAMPLE
            )
    layouts: dict[str, Layout] = {
        pattern: tuple(getattr(layout, "axes", None) or layout) for pattern, layout in layout_map.items()
    }
    return dict(mesh), layouts
