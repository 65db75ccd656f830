"""Programs that may still be running, because JAX returns their arrays before they end."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import jax

from kdist.control import whereabouts

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

_ENDED = ("succeeded", "reused")
# One array of each program, and the position in training at its dispatch.
_dispatched: collections.deque[tuple[jax.Array, tuple[str, int, int]]] = collections.deque(maxlen=64)


def note_dispatched(values: Structure, num_workers: int) -> None:
    """Remembers one array of a program. Code that reads it before it is ready waits for other workers, if any."""
    if num_workers == 1:
        return
    while isinstance(values, (dict, list, tuple)) and values:
        values = next(iter(values.values() if isinstance(values, dict) else values))
    while _dispatched and state_of(_dispatched[0][0]) in _ENDED:
        _dispatched.popleft()
    if isinstance(values, jax.Array):
        _dispatched.append((values, whereabouts.position()))


def first_unfinished() -> str | None:
    """Returns the position in training of the first program that has not succeeded yet, or `None`."""
    for array, where in list(_dispatched):
        if state_of(array) not in _ENDED:
            return whereabouts.words(*where)
    return None


def state_of(array: jax.Array) -> str:
    """Returns "running", "succeeded" or "failed" for a program, and "reused" if a later program has its array."""
    if array.is_deleted():  # `is_ready` could crash (jaxlib 0.10.2)
        return "reused"
    try:
        if not array.is_ready():
            return "running"
        array.block_until_ready()
        return "succeeded"
    except (RuntimeError, ValueError) as error:
        return "reused" if "deleted" in str(error) else "failed"


whereabouts.first_unfinished = first_unfinished
