"""Programs that were dispatched and have perhaps not ended: JAX returns their arrays before."""

from __future__ import annotations

import collections
from typing import Any

import jax

from kdist.backends import whereabouts

# One array of each program, and where in the training that was.
_dispatched: collections.deque[tuple[Any, tuple[str, int, int]]] = collections.deque(maxlen=64)


def note_dispatched(values: Any) -> None:
    """Remembers one array of a program: until it is ready, whoever reads it waits for others."""
    while isinstance(values, (dict, list, tuple)) and values:
        values = next(iter(values.values() if isinstance(values, dict) else values))
    while _dispatched and _has_ended(_dispatched[0][0]):
        _dispatched.popleft()
    if isinstance(values, jax.Array):
        _dispatched.append((values, whereabouts.position()))


def first_unfinished() -> str | None:
    """Returns where in the training the first program was dispatched that has not ended well."""
    for array, where in list(_dispatched):
        if not _has_ended(array):
            return whereabouts.words(*where)
    return None


def _has_ended(array: Any) -> bool:
    try:
        if array.is_ready():
            array.block_until_ready()
            return True
    except RuntimeError as error:  # deleted, since a later program has taken it; or it has failed
        return "deleted" in str(error)
    except ValueError:  # the engine's, as it failed
        return False
    return False


whereabouts.first_unfinished = first_unfinished
