"""Small messages between workers, as JSON over the engine's own exchange of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.errors import DatasetError, WorkerMismatchError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


def gather(runtime: Runtime, value: Any) -> list[Any]:
    """Gathers a JSON value from every worker, in the order of their indices.

    Args:
        runtime: The runtime whose workers take part; all must call.
        value: Anything that JSON can hold.

    Returns:
        One value a worker.
    """
    if runtime.num_workers == 1:
        return [value]
    return [json.loads(data) for data in runtime.all_gather_bytes(json.dumps(value).encode())]


def check_equal(
    runtime: Runtime, what: str, facts: Mapping[str, Any], hint: str, note: Any = None
) -> list[Any]:
    """Raises on all workers, with the same words, unless all have the same facts.

    Args:
        runtime: The runtime whose workers are compared.
        what: What is compared, for the message: "model", "arguments of fit".
        facts: Names and JSON values; lists are compared item by item, to name the first that differs.
        hint: What to do.
        note: A JSON value of this worker's that travels along and may differ.

    Returns:
        The note of each worker.

    Raises:
        WorkerMismatchError: Names the first fact that differs and the value of each worker.
    """
    if runtime.num_workers == 1:
        return [note]
    # JSON turns tuples into lists: compare what travelled.
    messages = gather(runtime, {"facts": dict(facts), "note": note})
    everyone = [message["facts"] for message in messages]
    names = dict.fromkeys(
        name for worker in everyone for name in worker
    )  # some may have facts that others lack
    for name in names:
        value = everyone[0].get(name)
        for index, other in enumerate(everyone[1:], start=1):
            if other.get(name) != value:
                mine, theirs = _first_difference(value, other.get(name))
                raise WorkerMismatchError(
                    f"All workers must have the same {what}, but worker 0 and worker {index} differ in {name}.",
                    received={"worker_0": mine, f"worker_{index}": theirs},
                    hint=hint,
                )
    return [message["note"] for message in messages]


def _first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b, strict=False):
            if x != y:
                return _first_difference(x, y)
        if len(a) != len(b):
            return f"{len(a)} items", f"{len(b)} items"
    return a, b


def try_on_all(runtime: Runtime, what: str, function: Callable[[], Any]) -> Any:
    """Calls a function of the user's on every worker, and raises on all if it fails on one.

    Args:
        runtime: The runtime whose workers take part; all must call.
        what: What failed, for the message: "The dataset_fn".
        function: Called without arguments.

    Returns:
        What the function returned on this worker.

    Raises:
        DatasetError: It failed on another worker; names the worker. On the worker itself, the error as it is.
    """
    error: Exception | None = None
    result = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    said = gather(runtime, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for index, text in enumerate(said):
        if text is not None:
            raise DatasetError(
                f"{what} failed on worker {index}: {text}",
                hint="" if "Received:" in text else "Look at that worker's traceback.",
            )
    return result
