"""Compares the collectives of all workers before each call, if `KDIST_DEBUG=1`.

If workers call different collectives, or one worker calls none, they hang or compute wrong results. So each
worker first sends the name of the collective, its shapes, and the line of the user's code that calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import call_site, gather
from kdist.cluster import environment, logs
from kdist.errors import WorkerMismatchError, WorkerTimeoutError

if TYPE_CHECKING:
    from kdist.arrays.types import Tensor

END = "the end of the function"


def is_on() -> bool:
    return environment.get("KDIST_DEBUG") not in (None, "", "0")


def check(runtime: Runtime, what: str, details: object = None, site: str | None = None) -> None:
    """Raises an error on all workers if they are about to call different collectives. Needs `KDIST_DEBUG`.

    `what` is the collective, for example "Strategy.reduce". `details` are JSON values that must also be
    equal, such as shapes. `site` is the line of the user's code (default: the current line).
    """
    if runtime.num_workers == 1 or not is_on():
        return
    mine = {"what": what, "details": details, "site": site or call_site()}
    everyone = _gather_in_time(runtime, mine)
    first = everyone[0]
    for index, other in enumerate(everyone[1:], start=1):
        if (other["what"], other["details"]) != (first["what"], first["details"]):
            raise WorkerMismatchError(
                f"Worker 0 and worker {index} called different collectives.",
                received={"worker_0": _describe(first), f"worker_{index}": _describe(other)},
                hint="Run the same code on every worker, with equal loops, and no branches that depend on it.",
            )


def check_all(runtime: Runtime, collectives: Sequence[tuple[str, object, str]]) -> None:
    """Compares the collectives of a function after it was traced; see `check`."""
    for what, details, site in collectives:
        check(runtime, what, details, site)
    check(runtime, END)


def signature(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Returns the dtypes and shapes of tensors, for `details`."""
    import keras

    return [[keras.backend.standardize_dtype(t.dtype), [n and int(n) for n in t.shape]] for t in tensors]


def _describe(said: dict[str, object]) -> str:
    details = "" if said["details"] is None else f" {said['details']}"
    return f"{said['what']}{details} at {said['site']}"


def _gather_in_time(runtime: Runtime, mine: dict[str, object]) -> list[dict[str, object]]:
    seconds = float(environment.get("KDIST_DEBUG_TIMEOUT") or 60)
    # A worker may be late for a good reason, so this is a warning, and not the timeout of the message.
    late = threading.Timer(seconds, _report, (mine, seconds))
    late.daemon = True
    late.start()
    try:
        return gather(runtime, mine)
    except WorkerTimeoutError as error:
        raise WorkerTimeoutError(
            f"Some workers did not reach {mine['what']}. {error.problem}",
            received={"this_worker": runtime.worker_index, "waits_at": mine["site"]},
            hint="Read the logs of the other workers: they show the code that ran instead.",
        ) from error
    finally:
        late.cancel()


def _report(mine: dict[str, object], seconds: float) -> None:
    logs.logger.warning(
        "this worker has waited %g s for the others at %s. Check in their logs if they run other code or have ended.",
        seconds,
        _describe(mine),
    )
