"""Structures of tensors, as the collectives of a replica take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues


def map_tensors(method: str, function: Callable[[Any], Any], value: Any) -> Any:
    """Calls a function for each tensor of a structure.

    Args:
        method: Of the replica's context, for the message.
        function: Called with a tensor.
        value: A structure of tensors, arrays and numbers, with `None` where there is nothing.

    Raises:
        InvalidArgumentError: The structure has distributed values.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            raise InvalidArgumentError(
                f"`{method}` takes the value of one replica, not a distributed one.",
                received={"value": leaf},
                hint="Pass the value as an argument of `strategy.run`: each replica gets its component.",
            )
        return None if leaf is None else function(keras.ops.convert_to_tensor(leaf))

    return keras.tree.map_structure(apply, value)
