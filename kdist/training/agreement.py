"""Checks that workers which must agree do, so that a difference is an error and not a hang or a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.backends.messages import check_equal, gather
from kdist.errors import KdistError, WorkerFailedError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


def check_model(runtime: Runtime, model: Any, variables: list[Any]) -> None:
    """Raises unless all workers built the same model: the same shapes and dtypes in the same order."""
    facts = {
        "class": type(model).__name__,
        "variables": [[v.path, list(v.shape), str(v.dtype)] for v in variables],
    }
    # Names carry counters ("dense_1"), which may differ where a worker built another model before.
    facts["variables"] = [entry[1:] for entry in facts["variables"]]
    check_equal(
        runtime, "model", facts, "Run the same script on every worker, without branches on the worker."
    )


def agree_to_stop(runtime: Runtime, stop: bool) -> bool:
    """Says whether any worker wants to stop."""
    return any(gather(runtime, bool(stop)))


def together(
    runtime: Runtime, where: str, function: Callable[[], Any], value: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Calls a function on every worker, waits for all, and raises on all if it fails on one.

    Args:
        runtime: The runtime whose workers take part; all must call.
        where: Where a failure is, for the message: "in a callback".
        function: Called without arguments.
        value: Gives, after that, a JSON value to exchange.

    Returns:
        The value of each worker.

    Raises:
        WorkerFailedError: It failed on another worker; names the worker. On the worker itself, the error as it is.
    """
    error: Exception | None = None
    try:
        function()
    except Exception as raised:
        # With an engine that has failed, nobody can be told.
        if isinstance(runtime.explain_failure(raised), KdistError):
            raise
        error = raised
    said = {
        "error": f"{type(error).__name__}: {error}" if error else None,
        "value": None if error else value(),
    }
    try:
        everyone = gather(runtime, said)
    except Exception:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    for index, theirs in enumerate(everyone):
        if theirs["error"] is not None:
            raise WorkerFailedError(
                f"Worker {index} failed {where}: {theirs['error']}", hint="Look at that worker's traceback."
            )
    return [theirs["value"] for theirs in everyone]
