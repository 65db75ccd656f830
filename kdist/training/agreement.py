"""Checks that workers which must agree do, so that a difference is an error and not a hang or a wrong number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kdist.backends.messages import gather
from kdist.errors import WorkerMismatchError

if TYPE_CHECKING:
    from kdist.backends.contract import Runtime


def check_equal(runtime: Runtime, what: str, facts: Mapping[str, Any], hint: str) -> None:
    """Raises on all workers, with the same words, unless all have the same facts.

    Args:
        runtime: The runtime whose workers are compared.
        what: What is compared, for the message: "model", "arguments of fit".
        facts: Names and JSON values; lists are compared item by item, to name the first that differs.
        hint: What to do.

    Raises:
        WorkerMismatchError: Names the first fact that differs and the value of each worker.
    """
    if runtime.num_workers == 1:
        return
    # JSON turns tuples into lists: compare what travelled.
    everyone = gather(runtime, dict(facts))
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


def _first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b, strict=False):
            if x != y:
                return _first_difference(x, y)
        if len(a) != len(b):
            return f"{len(a)} items", f"{len(b)} items"
    return a, b


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


def agree_on_batch(runtime: Runtime, num_rows: int, step: int) -> bool:
    """Says whether there is a batch in this step; raises where only some workers have one or sizes differ.

    Args:
        runtime: The runtime whose workers take part.
        num_rows: Rows of this worker's global batch; 0 when its data has ended.
        step: Index of the step in the epoch, for the message.
    """
    rows = gather(runtime, num_rows)
    if len(set(rows)) == 1:
        return num_rows > 0
    differing = next(i for i, n in enumerate(rows) if n != rows[0])
    raise WorkerMismatchError(
        f"All workers must be given the same dataset, but in step {step} worker 0 has a global batch of "
        f"{rows[0]} rows and worker {differing} one of {rows[differing]}.",
        received={"rows": rows},
        hint="Give every worker the same global batches, in the same order: kdist takes each worker's share.",
    )
