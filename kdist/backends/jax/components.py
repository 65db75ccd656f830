"""On-read variables on JAX: each device holds its replica's component, beside what all of them aggregate to.

The value of such a variable in a program is a pair, (component, aggregate). The components are said to be equal on
all devices, as everything is that a program keeps, and are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kdist import keras_hooks
from kdist.backends.aggregation import is_on_read, share_of
from kdist.backends.jax.core import JaxCore


def has_components(runtime: JaxCore, variable: Any) -> bool:
    """Says whether the replicas have components of a variable."""
    return runtime.num_replicas > 1 and is_on_read(variable)


def place_shares(runtime: JaxCore, variable: Any) -> Any:
    """Returns the components that a variable's present value gives the local replicas."""
    value, number = keras_hooks.native_value(variable), runtime.num_replicas
    return place_components(runtime, [share_of(variable, value, i, number) for i in runtime.replica_ids])


def place_components(runtime: JaxCore, parts: Sequence[Any]) -> Any:
    """Returns the components of the local replicas as one array over the mesh."""
    placed = [
        jax.device_put(part, device, may_alias=False)
        for part, device in zip(parts, runtime.local_devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(parts[0].shape, runtime.replicated, placed)
