"""`Topology`: who computes, who holds the variables and in which layout.

A strategy decides it, a backend builds its runtime from it, and what writes or reads variables asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kdist.cluster import Cluster
from kdist.errors import InvalidArgumentError

Layout = tuple[str | None, ...]
"""For each axis of a variable, the axis of the mesh over which it is divided; `None` where it is whole."""


@dataclass(frozen=True)
class Mirrored:
    """Every replica holds every variable, whole."""


@dataclass(frozen=True)
class Central:
    """One device of the worker holds the variables; its replicas compute with copies."""

    device: str


@dataclass(frozen=True)
class Sharded:
    """The devices of all workers form a mesh, over whose axes the variables are divided.

    Args:
        axes: Name and length of each axis, the devices of worker 0 first and the last axis fastest. One length may
            be `None`: what is left.
        batch_axis: The axis over which a model's step divides the rows.
        layout: Says for the path and the shape of a variable, and the lengths of the axes, how it is divided. Of an
            optimizer's variables, for the path of the variable that they belong to.
    """

    axes: Mapping[str, int | None]
    batch_axis: str
    layout: Callable[[str, tuple[int, ...], Mapping[str, int]], Layout]

    def unused_rules(self) -> list[str]:
        """Returns the rules of the layout, where it has any, that were for nothing yet."""
        return sorted(getattr(self.layout, "unused", ()))

    def mesh_shape(self, num_devices: int) -> tuple[int, ...]:
        """Returns the lengths of all axes.

        Raises:
            InvalidArgumentError: They need another number of devices.
        """
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


@dataclass(frozen=True)
class Topology:
    """Who computes, who holds the variables and in which layout.

    Args:
        devices: Those of this worker, a replica each; `()` for those that the backend prefers.
        cluster: Who takes part, and the role of each task; `None` for this process alone.
        storage: Who holds the variables: `Mirrored`, `Central` or `Sharded`.
    """

    devices: tuple[str, ...]
    cluster: Cluster | None = None
    storage: Mirrored | Central | Sharded = field(default_factory=Mirrored)

    @property
    def worker_index(self) -> int:
        """The number of this worker, from 0."""
        return 0 if self.cluster is None else self.cluster.worker_index

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this worker that hold variables, or parts of them."""
        return (self.storage.device,) if isinstance(self.storage, Central) else self.devices
