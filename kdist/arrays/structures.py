"""Structures of tensors in the collectives of a replica, and sums of changes by several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kdist.errors import InvalidArgumentError
from kdist.values import DistributedValues, PerReplica, ReduceOp, is_same

if TYPE_CHECKING:
    from kdist.arrays.types import Structure, T, Tensor


def map_tensors(method: str, function: Callable[[Tensor], Tensor], value: Structure) -> Structure:
    """Calls a function for each leaf of a structure, as a tensor. The error message contains `method`."""

    def apply(leaf: object) -> Structure:
        if isinstance(leaf, DistributedValues):
            raise InvalidArgumentError(
                f"`{method}` received a distributed value instead of the value of one replica.",
                received={"value": leaf},
                hint="Pass the value as an argument of `strategy.run`: each replica gets its component.",
            )
        return None if leaf is None else function(keras.ops.convert_to_tensor(leaf))

    return keras.tree.map_structure(apply, value)


def joined(parts: Sequence[T]) -> T:
    """Joins the arguments of the local replicas in a `merge_call`, with one structure per replica.

    Tensors become `PerReplica` values. Objects and constants that are the same in all replicas (a variable, a
    name) stay unchanged.
    """

    if len(parts) == 1:
        return parts[0]

    def join(*leaves: object) -> object:
        # On TensorFlow, `is_tensor` also returns `True` for a Keras variable.
        is_tensor = keras.ops.is_tensor(leaves[0]) and not isinstance(leaves[0], keras.Variable)
        return leaves[0] if is_same(leaves) and not is_tensor else PerReplica(leaves)

    return keras.tree.map_structure(join, *parts)


def as_summand(op: ReduceOp, tensor: Tensor) -> Tensor:
    """Casts a tensor to the dtype in which it is reduced. The sum of integers keeps their dtype and may overflow.

    A sum counts Booleans, as in NumPy. For a mean, casts integers to the dtype of TensorFlow's division, which
    `tf.distribute` uses. Source: https://www.tensorflow.org/api_docs/python/tf/math/truediv
    """
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if op is ReduceOp.SUM:
        return keras.ops.cast(tensor, "int32") if dtype == "bool" else tensor
    if "int" not in dtype and dtype != "bool":
        return tensor
    is_small = dtype in ("bool", "int8", "uint8", "int16", "uint16")
    return keras.ops.cast(tensor, "float32" if is_small else "float64")


def merged(where: Callable[..., Any], now: Any, base: Any, new: Any) -> Any:
    """Adds the change from `base` to `new` to the elements that another worker has changed since, if it is a sum.

    `where` is the function of NumPy or TensorFlow.
    """
    with np.errstate(all="ignore"):
        return where((now == base) | ~is_sum(base, new), new, now + (new - base))


def is_sum(base: Any, new: Any, error: float = 0.01) -> Any:
    """Returns for each element whether `base` plus the difference is `new`, up to a relative error.

    This is not so if the difference is infinite, or much larger than `new`.
    """
    with np.errstate(all="ignore"):
        return abs(base + (new - base) - new) <= error * abs(new)
