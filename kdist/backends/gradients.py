"""Checks the results of the user's function in `value_and_grad`, for all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from kdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kdist.arrays.types import Structure, Tensor


def split_aux(result: Any, has_aux: bool) -> tuple[Any, Structure]:
    """Returns the loss and the auxiliary result of a function."""
    if not has_aux:
        return result, None
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise InvalidArgumentError(
        "The function did not return a pair, but `has_aux` is true.",
        received={"result": type(result).__name__},
        hint="Return the loss and the other results: return loss, predictions",
    )


def check_loss(loss: Tensor) -> None:
    """Raises an error unless the loss is a floating-point scalar."""
    shape = getattr(loss, "shape", None)
    if (
        shape is not None
        and len(shape) == 0
        and keras.backend.is_float_dtype(keras.backend.standardize_dtype(loss.dtype))
    ):
        return
    raise InvalidArgumentError(
        "Cannot differentiate the function: its loss is not a floating-point scalar.",
        received={"shape": None if shape is None else tuple(shape), "type": type(loss).__name__},
        hint="Reduce the loss: keras.ops.mean(losses). To return more results, pass has_aux=True.",
    )
