"""Why a worker no longer takes part in the job: the reasons that workers send to each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kdist.errors import WorkerLostError

DIED, STOPPED, HUNG, FAILED, LOST_ANOTHER, ENDED = b"D", b"Z", b"H", b"F", b"L", b"E"
REASONS = {
    DIED: "it died or is unreachable",
    STOPPED: "it does not run: a signal such as SIGSTOP stopped it, or its machine is frozen",
    HUNG: "it hung",
    FAILED: "it failed with an error",
    LOST_ANOTHER: "it lost another worker",
    ENDED: "it ended before the others",
}
KINDS = {kind.decode(): kind for kind in REASONS}
_SUDDEN = (DIED, STOPPED, HUNG)


@dataclass(frozen=True)
class Loss:
    """A worker that no longer takes part in the job.

    Args:
        kind: A key of `REASONS`.
        reason: The reason in words.
        delivered: The number of messages that the chief has received from this worker for all workers.
    """

    kind: bytes
    reason: str
    delivered: int = 0

    @property
    def is_cause(self) -> bool:
        """Whether this worker can be the cause of the loss of others."""
        return self.kind in (*_SUDDEN, FAILED)

    @property
    def is_sudden(self) -> bool:
        """Whether the worker could not end its collectives."""
        return self.kind in _SUDDEN


def first_cause(losses: Mapping[int, Loss]) -> dict[int, str]:
    """Returns the worker that was lost first, and the reason; empty if there is none.

    Prefers a worker that may have caused the loss of the others. `losses` is in the order of detection.
    """
    causes = [index for index, loss in losses.items() if loss.is_cause]
    others = [index for index, loss in losses.items() if loss.kind == ENDED]
    return {index: losses[index].reason for index in [*causes, *others, *losses][:1]}


def of_this_process() -> Loss:
    """Returns the reason why this process ends: its uncaught error, if there is one."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # errors do not end an interactive session
        return Loss(ENDED, REASONS[ENDED])
    return of_error(error)


def of_error(error: BaseException) -> Loss:
    """Returns the reason for a process that ends with an error."""
    if isinstance(error, WorkerLostError):
        return Loss(LOST_ANOTHER, REASONS[LOST_ANOTHER])
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return Loss(FAILED, f"it failed: {text}")
