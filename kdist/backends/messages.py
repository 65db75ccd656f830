"""Small messages between workers, as JSON over the engine's own exchange of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.errors import DatasetError

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
