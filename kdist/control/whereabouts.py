"""Tracks where this process is in its training, for the errors of workers that have lost another worker.

The training loop updates this state at every step, so it is plain module state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kdist.tracing import span

phase = ""
epoch = 0
step = 0
total_steps = 0
"""The number of training steps of this process so far, over all epochs and calls of `fit`."""

collective = ""
"""The collective that the main thread is waiting in, if known."""

last_saved = ""
"""The directory of the last complete checkpoint that this process has seen."""

first_unfinished: Callable[[], str | None] | None = None
"""Returns the position of the oldest unfinished step, for a backend that dispatches steps asynchronously."""


def enter(new_phase: str, new_epoch: int | None = None, new_step: int | None = None) -> None:
    """Records the start of a phase such as "validation", with its epoch and step, which count from 1."""
    global phase, epoch, step
    phase = new_phase
    if new_epoch is not None:
        epoch, step = new_epoch, 0
    if new_step is not None:
        step = new_step


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """A context manager for a collective, so that errors name it."""
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
    """Returns the position of this process in its training; "a place outside of fit" if it is unknown.

    Example:

    >>> from kdist.control import whereabouts
    >>> whereabouts.enter("step", 2, 30)
    >>> whereabouts.describe()
    'step 30 of epoch 2'
    >>> whereabouts.enter("")
    """
    return words(*position())


def words(phase: str, epoch: int, step: int) -> str:
    if not phase:
        return "a place outside of fit"
    if phase == "step":
        return f"step {step} of epoch {epoch}"
    if not epoch:
        return phase
    return f"{phase}, after step {step} of epoch {epoch}" if step else f"{phase} of epoch {epoch}"


def describe_wait() -> str:
    """Returns where this process waits for the others, for example "all_reduce at step 30 of epoch 2"."""
    what = collective or ("the collectives of the step" if phase else "a collective")
    where = (first_unfinished and first_unfinished()) or describe()
    return f"{what} at {where}" if phase else f"{what} in your script, outside of `fit`"
