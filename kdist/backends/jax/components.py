"""On-read variables on JAX: each device holds its replica's component, beside what all of them aggregate to.

The value of such a variable in a program is a pair, (component, aggregate). The components are said to be equal on
all devices, as everything is that a program keeps, and are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kdist.backends.aggregation import is_on_read, share_of
from kdist import keras_hooks
from kdist.backends.jax.replicas import Replicas


def has_components(replicas: Replicas, variable: Any) -> bool:
    """Says whether the replicas have components of a variable."""
    return replicas.num_replicas > 1 and is_on_read(variable)


def place_shares(replicas: Replicas, variable: Any) -> Any:
    """Returns the components that a variable's present value gives the local replicas."""
    value, number = keras_hooks.native_value(variable), replicas.num_replicas
    return place_components(replicas, [share_of(variable, value, i, number) for i in replicas.local_ids])


def place_components(replicas: Replicas, parts: Sequence[Any]) -> Any:
    """Returns the components of the local replicas as one array over the mesh."""
    placed = [
        jax.device_put(part, device, may_alias=False)
        for part, device in zip(parts, replicas.local_devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(parts[0].shape, replicas.replicated, placed)
