"""Programs that may still be running, because JAX returns their arrays before they end."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import jax

from kdist.control import whereabouts

if TYPE_CHECKING:
    from kdist.arrays.types import Structure

# One array of each program, and the position in training at its dispatch.
_dispatched: collections.deque[tuple[jax.Array, tuple[str, int, int]]] = collections.deque(maxlen=64)


def note_dispatched(values: Structure, num_workers: int) -> None:
    """Remembers one array of a program. Code that reads it before it is ready waits for other workers, if any."""
    if num_workers == 1:
        return
    while isinstance(values, (dict, list, tuple)) and values:
        values = next(iter(values.values() if isinstance(values, dict) else values))
    while _dispatched and _has_ended(_dispatched[0][0]):
        _dispatched.popleft()
    if isinstance(values, jax.Array):
        _dispatched.append((values, whereabouts.position()))


def first_unfinished() -> str | None:
    """Returns the position in training of the first program that has not succeeded yet, or `None`."""
    for array, where in list(_dispatched):
        if not _has_ended(array):
            return whereabouts.words(*where)
    return None


def _has_ended(array: jax.Array) -> bool:
    if array.is_deleted():  # a later program reuses it; `is_ready` could crash (jaxlib 0.10.2)
        return True
    try:
        if array.is_ready():
            array.block_until_ready()
            return True
    except RuntimeError as error:  # deleted, because a later program reuses it; or failed
        return "deleted" in str(error)
    except ValueError:  # the program failed in the backend
        return False
    return False


whereabouts.first_unfinished = first_unfinished
