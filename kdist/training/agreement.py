"""Checks that workers which must agree do, so that a difference is an error and not a hang or a wrong number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist.backends.messages import check_equal, gather

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
