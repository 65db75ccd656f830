"""Sends rows between workers, so that every worker gets the whole global batch.

This only happens if the replicas' parts differ in length, as in the last batches of unequal pipelines. A step
on the whole batch gives the results of one device. No replica is without rows, where the loss would be 0 / 0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from kdist.arrays import rows
from kdist.errors import DatasetError, malformed_as

if TYPE_CHECKING:
    from kdist.arrays.types import Structure, T

_FAILED = b"!"  # JSON never starts with it


class Messenger(Protocol):
    """Gathers messages from all workers."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...


def gather_rows(messenger: Messenger, parts: Sequence[T | None]) -> T:
    """Returns the rows of all replicas, from a batch or `None` per replica. All workers must call it."""
    local = [rows.to_host(part) for part in parts if part is not None]
    received = _gather(messenger, lambda: encode(rows.join(local)) if local else b"")
    batches = [decode(data) for data in received if data]
    try:
        return rows.join(batches)
    except ValueError as error:
        raise DatasetError(
            "The batches of the workers differ in their structure or inner shapes.",
            received={"error": str(error).splitlines()[0]},
            hint="Yield batches of the same structure and inner shapes on every worker.",
        ) from error


def _gather(messenger: Messenger, encoded: Callable[[], bytes]) -> list[bytes]:
    """Gathers messages. If one worker cannot encode its message, all workers raise."""
    error: Exception | None = None
    message = b""
    try:
        message = encoded()
    except Exception as raised:
        error = raised
        message = _FAILED + str(raised).encode()
    received = messenger.all_gather_bytes(message)
    for index, data in enumerate(received):
        if data.startswith(_FAILED):
            text = data.removeprefix(_FAILED).decode()
            hint = "" if "Received:" in text else f"Read the traceback of worker {index}."
            raise DatasetError(
                f"Worker {index} cannot send its rows to the others. {text}", hint=hint
            ) from error
    return received


def encode(batch: Structure) -> bytes:
    """Encodes a batch of NumPy arrays: a line of JSON with its structure, then the bytes of the arrays."""
    arrays: list[np.ndarray] = []

    def describe(value: Structure) -> dict[str, object] | None:
        if value is None:
            return None
        if isinstance(value, dict):
            return {"dict": [[key, describe(item)] for key, item in value.items()]}
        if isinstance(value, (tuple, list)):
            return {type(value).__name__ if type(value) is list else "tuple": [describe(v) for v in value]}
        if type(value) in (bool, int, float, str):
            return {"value": value}
        array = None if rows.has_sparse(value) or rows.is_ragged(value) else np.asarray(value)
        if array is None or not (array.dtype.kind in "biufcSUO" or array.dtype.name == "bfloat16"):
            kind = "a sparse or ragged tensor" if array is None else f"an array of {array.dtype}"
            raise DatasetError(
                f"Cannot send {kind} to other workers. It must be sent, because the replicas have different numbers "
                "of rows.",
                received={"type": type(value).__name__},
                hint="Batch with drop_remainder=True, or use dense arrays of numbers or strings.",
            )
        if array.dtype.kind == "O":
            return {"shape": list(array.shape), "strings": [_text(item) for item in array.ravel()]}
        arrays.append(np.ascontiguousarray(array))
        name = "bfloat16" if array.dtype.kind == "V" else array.dtype.str
        return {"shape": list(array.shape), "dtype": name}

    header = json.dumps(describe(batch)).encode()
    return b"\n".join([header, b"".join(a.tobytes() for a in arrays)])


def decode(data: bytes) -> Any:
    with malformed_as(
        lambda error: DatasetError(
            "A batch from another worker has an unknown format.",
            received={"bytes": len(data), "error": error},
            hint="Install the same version of kdist on all workers.",
        )
    ):
        return _decode(data)


def _decode(data: bytes) -> Any:
    header, _, body = data.partition(b"\n")
    position = 0

    def build(node: Any) -> Any:
        nonlocal position
        if node is None:
            return None
        if "value" in node:
            return node["value"]
        if "dict" in node:
            return {_key(key): build(item) for key, item in node["dict"]}
        if "tuple" in node:
            return tuple(build(item) for item in node["tuple"])
        if "list" in node:
            return [build(item) for item in node["list"]]
        shape = node["shape"]
        if "strings" in node:
            array = np.empty(len(node["strings"]), object)
            array[:] = [_from_text(item) for item in node["strings"]]
            return array.reshape(shape)
        dtype = np.dtype(ml_dtypes.bfloat16 if node["dtype"] == "bfloat16" else node["dtype"])
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, dtype, count, position).reshape(shape)
        position += count * dtype.itemsize
        return array.copy()

    return build(json.loads(header))


def _key(key: Any) -> Any:
    """Restores a tuple, which JSON turns into a list."""
    return tuple(map(_key, key)) if isinstance(key, list) else key


def _text(item: object) -> list[str]:
    if isinstance(item, bytes):
        return ["bytes", base64.b64encode(item).decode()]
    if isinstance(item, str):
        return ["str", item]
    raise DatasetError(
        "An array of objects contains a value that is not a string.",
        received={"type": type(item).__name__},
        hint="Use arrays of numbers or strings.",
    )


def _from_text(item: list[str]) -> bytes | str:
    kind, text = item
    return base64.b64decode(text) if kind == "bytes" else text


def empty_parts(messenger: Messenger, parts: Sequence[Structure]) -> list[Structure]:
    """Replaces `None` with batches without rows. All workers must call it, at least one with a batch."""
    like = next((rows.empty_like(rows.to_host(part)) for part in parts if part is not None), None)
    messages = _gather(messenger, lambda: b"" if like is None else encode(like))
    if like is None:
        like = decode(next(message for message in messages if message))
    return [like if part is None else part for part in parts]
