"""Where this process is in its training, in words: for the errors of workers that have lost another.

Kept by the training loop as plain module state, since it is written at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kdist.tracing import span

phase = ""
epoch = 0
step = 0
total_steps = 0
"""Training steps of this process so far, over all epochs and calls of `fit`."""

collective = ""
"""The collective that the main thread waits in, where kdist knows it."""

last_saved = ""
"""The folder of the last checkpoint that this process has seen complete."""

first_unfinished: Callable[[], str | None] | None = None
"""Says where the step was that the engine has not ended yet: for an engine that runs ahead."""


def enter(new_phase: str, new_epoch: int | None = None, new_step: int | None = None) -> None:
    """Notes what begins: a phase such as "validation", and its epoch and step, counted from 1; else they stay."""
    global phase, epoch, step
    phase = new_phase
    if new_epoch is not None:
        epoch, step = new_epoch, 0
    if new_step is not None:
        step = new_step


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Entered for the time of a collective, which is then named in errors."""
    global collective
    collective = name
    try:
        with span(name, "exchange"):
            yield
    finally:
        collective = ""


def position() -> tuple[str, int, int]:
    """Returns the phase, the epoch and the step of this process, for `words`."""
    return phase, epoch, step


def describe() -> str:
    """Returns where this process is; "a place outside of fit" where kdist does not know.

    Example:

    >>> from kdist.backends import whereabouts
    >>> whereabouts.enter("step", 2, 30)
    >>> whereabouts.describe()
    'step 30 of epoch 2'
    >>> whereabouts.enter("")
    """
    return words(*position())


def words(phase: str, epoch: int, step: int) -> str:
    """Returns a position in words."""
    if not phase:
        return "a place outside of fit"
    if phase == "step":
        return f"step {step} of epoch {epoch}"
    if not epoch:
        return phase
    return f"{phase}, after step {step} of epoch {epoch}" if step else f"{phase} of epoch {epoch}"


def describe_wait() -> str:
    """Returns which collective this process waits in, and where: "all_reduce at step 30 of epoch 2"."""
    what = collective or ("the collectives of the step" if phase else "a collective")
    where = (first_unfinished and first_unfinished()) or describe()
    return f"{what} at {where}" if phase else f"{what} outside of fit"
