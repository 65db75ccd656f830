"""`Topology`: the devices that compute, the devices that hold the variables, and their layout.

A strategy creates it, and a backend builds its runtime from it. Code that reads or writes variables uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdist.cluster import Cluster
from kdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np

Layout = tuple[str | None, ...]
"""For each axis of a variable, the mesh axis over which it is sharded; `None` if the axis is not sharded."""


@dataclass(frozen=True)
class Mirrored:
    """Every replica holds a full copy of every variable."""


@dataclass(frozen=True)
class Central:
    """One device of the worker holds the variables; the replicas compute with copies."""

    device: str


@dataclass(frozen=True)
class Sharded:
    """The devices of all workers form a mesh, and the variables are sharded over its axes.

    Args:
        axes: The name and length of each axis. The devices of worker 0 come first, and the last axis varies
            fastest. One length may be `None`; kdist computes it from the number of devices.
        batch_axis: The axis over which a step of a model divides the rows.
        layout: Returns the layout of a variable for its path, its shape and the lengths of the axes. For a
            variable of an optimizer, the path is the path of the model's variable that it belongs to.
    """

    axes: Mapping[str, int | None]
    batch_axis: str
    layout: Callable[[str, tuple[int, ...], Mapping[str, int]], Layout]

    def unused_rules(self) -> list[str]:
        """Returns the rules of the layout that have not matched anything yet, if the layout has rules."""
        return sorted(getattr(self.layout, "unused", ()))

    def mesh_shape(self, num_devices: int) -> tuple[int, ...]:
        """Returns the lengths of all axes. Raises an `InvalidArgumentError` if the mesh does not fit the devices."""
        known = math.prod(length for length in self.axes.values() if length is not None)
        rest, left = divmod(num_devices, known)
        shape = tuple(rest if length is None else length for length in self.axes.values())
        if left or math.prod(shape) != num_devices:
            raise InvalidArgumentError(
                f"The mesh does not fit the devices: all workers together have {num_devices}.",
                received={"mesh": dict(self.axes), "devices": num_devices},
                hint=f"Choose a mesh whose axes have the product {num_devices}, or change the number of devices or "
                "workers.",
            )
        return shape

    def lengths(self, num_devices: int) -> dict[str, int]:
        """Returns the name and the length of each axis; see `mesh_shape`."""
        return dict(zip(self.axes, self.mesh_shape(num_devices), strict=True))


@dataclass(frozen=True)
class LocalParts:
    """The parts of a sharded variable on the devices of one worker. `(start, stop)` is a part along an axis.

    Args:
        axis: The axis of the variable over which it is sharded.
        parts: A function per part that returns it on the host.
        to_save: The parts that this worker saves. If workers hold copies of a part, one of them saves it.
        assign: Assigns new values of all parts, without communication. All workers must call it.
    """

    axis: int
    parts: Mapping[tuple[int, int], Callable[[], np.ndarray]]
    to_save: Collection[tuple[int, int]]
    assign: Callable[[Mapping[tuple[int, int], np.ndarray]], None]


@dataclass(frozen=True)
class Topology:
    """The devices that compute, the devices that hold the variables, and the layout of the variables.

    Args:
        devices: The devices of this worker, one per replica; `()` for the default devices of the backend.
        cluster: The tasks and their roles; `None` for a single process.
        storage: The devices that hold the variables: `Mirrored`, `Central` or `Sharded`.
    """

    devices: tuple[str, ...]
    cluster: Cluster | None = None
    storage: Mirrored | Central | Sharded = field(default_factory=Mirrored)

    @property
    def worker_index(self) -> int:
        return 0 if self.cluster is None else self.cluster.worker_index

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this worker that hold variables or shards of variables."""
        return (self.storage.device,) if isinstance(self.storage, Central) else self.devices

    @property
    def is_central(self) -> bool:
        """Whether one device of the worker holds all variables."""
        return isinstance(self.storage, Central)

    @property
    def sharded(self) -> Sharded | None:
        """The mesh and the layouts, if variables are sharded."""
        return self.storage if isinstance(self.storage, Sharded) else None
