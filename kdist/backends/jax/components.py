"""On-read variables on JAX: each device holds its replica's component and the aggregate of all components.

In a program, the value of such a variable is a pair, (component, aggregate). Programs declare all values that
they keep as equal on all devices. For components, this is not true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from kdist import keras_hooks
from kdist.backends.aggregation import is_on_read, share_of
from kdist.backends.jax.core import JaxCore

if TYPE_CHECKING:
    import keras


def has_components(runtime: JaxCore, variable: keras.Variable) -> bool:
    return runtime.num_replicas > 1 and is_on_read(variable)


def place_shares(runtime: JaxCore, variable: keras.Variable) -> jax.Array:
    """Returns the components of the local replicas for a variable's current value."""
    value, number = keras_hooks.native_value(variable), runtime.num_replicas
    return place_components(runtime, [share_of(variable, value, i, number) for i in runtime.replica_ids])


def place_components(runtime: JaxCore, parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the components of the local replicas as one array over the mesh."""
    placed = [
        jax.device_put(part, device, may_alias=False)
        for part, device in zip(parts, runtime.local_devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(parts[0].shape, runtime.replicated, placed)
