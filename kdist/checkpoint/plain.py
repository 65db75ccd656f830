"""Converts numbers, strings, lists, tuples, dictionaries, bytes and arrays to JSON and back."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kdist.checkpoint.checked_reading import dtype_of
from kdist.checkpoint.index import DTYPES
from kdist.errors import InvalidArgumentError

_SPECIAL = ("$tuple", "$dict", "$bytes", "$array", "$tensor", "$native")


def encode(name: str, value: object, store: Callable[[str, np.ndarray], None] | None = None) -> object:
    """Returns a value as JSON. Passes each array and its name to `store`, or embeds arrays if it is `None`.

    Raises:
        InvalidArgumentError: If the value contains an object of an unsupported type.
    """

    def visit(at: str, item: object) -> object:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, np.generic) and not isinstance(number := item.item(), np.generic):
            return visit(at, number)
        if isinstance(item, bytes):
            return {"$bytes": base64.b64encode(item).decode()}
        if isinstance(item, tuple):
            return {"$tuple": [visit(f"{at}/{i}", part) for i, part in enumerate(item)]}
        if isinstance(item, list):
            return [visit(f"{at}/{i}", part) for i, part in enumerate(item)]
        if isinstance(item, dict):
            if all(isinstance(key, str) and key not in _SPECIAL for key in item):
                return {key: visit(f"{at}/{key}", part) for key, part in item.items()}
            return {"$dict": [[visit(at, k), visit(f"{at}/{k}", part)] for k, part in item.items()]}
        is_array = isinstance(item, np.ndarray)  # with NumPy's backend, arrays are also tensors
        if not is_array and keras.ops.is_tensor(item):
            # A restore would replace it in the `Checkpoint` only, and the program would keep its old value.
            is_leaf = getattr(item, "requires_grad", False) and getattr(item, "is_leaf", False)
            if store is not None and (is_leaf or hasattr(item, "assign")):
                raise InvalidArgumentError(
                    f"Cannot save {at!r}: a restore cannot assign to a variable of TensorFlow or PyTorch.",
                    received={"name": at, "type": type(item).__name__},
                    hint='Pass a Keras variable, for example keras.Variable(0, dtype="int64"), or a number.',
                )
            item = keras.ops.convert_to_numpy(item)
            if store is None:  # for `set_state`, which may need the type from `get_state`
                return {"$native": visit(at, item)}
        if isinstance(item, np.ndarray) and item.dtype.name in DTYPES:
            # The name of a dtype does not contain the byte order.
            array = item.astype(item.dtype.newbyteorder("="), copy=False)
            if store is not None:
                store(at, array)
                return {"$tensor": at}
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return {"$array": [array.dtype.name, list(array.shape), data]}
        raise InvalidArgumentError(
            f"Cannot save {at!r}: a checkpoint cannot contain an object of this type.",
            received={"name": at, "type": type(item).__name__},
            hint="Add get_state() and set_state(state) to its class, or pass Keras objects, numbers, strings, arrays, "
            "lists or dictionaries.",
        )

    return visit(name, value)


def decode(value: object, arrays: Any = None) -> Any:
    """Returns the value that `encode` converted. `arrays` contains the stored arrays by name."""
    if isinstance(value, list):
        return [decode(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in _SPECIAL:
        (kind, content), *_ = value.items()
        if kind == "$tuple":
            return tuple(decode(part, arrays) for part in content)
        if kind == "$dict":
            return {decode(key, arrays): decode(part, arrays) for key, part in content}
        if kind == "$bytes":
            return base64.b64decode(content)
        if kind == "$tensor":
            return arrays[content]
        if kind == "$native":
            tensor = keras.ops.convert_to_tensor(decode(content))
            # A random generator of PyTorch does not accept a state that is on a GPU.
            return tensor.cpu() if hasattr(tensor, "cpu") else tensor
        dtype, shape, data = content
        return np.frombuffer(base64.b64decode(data), dtype_of(dtype)).reshape(shape).copy()
    return {key: decode(part, arrays) for key, part in value.items()}


def tensors_in(value: object) -> list[str]:
    """Returns the names of the stored arrays in the JSON from `encode`."""
    if isinstance(value, list):
        return [name for part in value for name in tensors_in(part)]
    if isinstance(value, dict):
        if list(value) == ["$tensor"]:
            return [value["$tensor"]]
        return [name for part in value.values() for name in tensors_in(part)]
    return []
