"""Structures of tensors, as the collectives of a replica take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues, regroup


def map_tensors(method: str, function: Callable[[Any], Any], value: Any) -> Any:
    """Calls a function for each tensor of a structure of tensors, arrays and numbers; the method is for the error."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            raise InvalidArgumentError(
                f"`{method}` takes the value of one replica, not a distributed one.",
                received={"value": leaf},
                hint="Pass the value as an argument of `strategy.run`: each replica gets its component.",
            )
        return None if leaf is None else function(keras.ops.convert_to_tensor(leaf))

    return keras.tree.map_structure(apply, value)


def joined(parts: Sequence[Any]) -> Any:
    """Joins what the local replicas bring to a `merge_call`, one structure each.

    Tensors become `PerReplica` values. Objects and constants that are the same in all replicas (a variable, a name)
    stay what they are.
    """

    def undistributed(leaf: Any) -> Any:
        values = leaf.values if isinstance(leaf, DistributedValues) else ()
        # To TensorFlow a Keras variable is a tensor.
        if not values or (keras.ops.is_tensor(values[0]) and not isinstance(values[0], keras.Variable)):
            return leaf
        first = values[0]
        constant = isinstance(first, (bool, int, float, complex, str, bytes))
        same = all(v is first or (constant and type(v) is type(first) and v == first) for v in values)
        return first if same else leaf

    return keras.tree.map_structure(undistributed, regroup(parts, keras.tree.map_structure))


def is_integer(tensor: Any) -> bool:
    """Says whether a tensor holds whole numbers or truth values, whose mean is of another dtype."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return "int" in dtype or dtype == "bool"


def as_float(tensor: Any) -> Any:
    """Returns a tensor of Keras's floating-point dtype."""
    return keras.ops.cast(tensor, keras.config.floatx())
