"""Where workers on JAX say that they wait for each other: the key-value store of the coordination service."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import jax

from kdist.backends import mail, whereabouts
from kdist.backends.stalls import Board

_FOLDER = "kdist/waits"
# Code that waits for a device, or for an answer of the service.
_ENGINE = (
    os.path.join(os.path.dirname(jax.__file__), ""),
    os.path.join(os.path.dirname(__file__), ""),
    mail.__file__,
)

# One array of each program that was dispatched and has perhaps not ended, and where in the training that was.
_dispatched: collections.deque[tuple[Any, str]] = collections.deque(maxlen=64)


def note_dispatched(values: Any) -> None:
    """Remembers one array of a program: until it is ready, whoever reads it waits for others."""
    while isinstance(values, (dict, list, tuple)) and values:
        values = next(iter(values.values() if isinstance(values, dict) else values))
    while _dispatched and _has_ended(_dispatched[0][0]):
        _dispatched.popleft()
    if isinstance(values, jax.Array):
        _dispatched.append((values, whereabouts.describe()))


def first_unfinished() -> str | None:
    """Returns where in the training the first program was dispatched that has not ended well."""
    for array, where in list(_dispatched):
        if not _has_ended(array):
            return where
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


class ServiceBoard(Board):
    """Who waits for whom.

    Args:
        client: The client of the coordination service.
        worker_index: Which worker this is.
        farewell: Tells the others why this worker ends.
    """

    def __init__(self, client: Any, worker_index: int, farewell: Callable[[str], None]) -> None:
        self._client = client
        self._index = worker_index
        self._farewell = farewell

    def say(self, text: str | None) -> None:
        """Says where this worker waits for the others."""
        key = f"{_FOLDER}/{self._index}"
        if text is None:
            self._client.key_value_delete(key)
        else:
            self._client.key_value_set(key, text, allow_overwrite=True)

    def read(self) -> dict[int, str]:
        """Returns the other workers that wait, and where."""
        entries = {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(_FOLDER)}
        entries.pop(self._index, None)
        return entries

    def waits_in(self, filename: str) -> bool:
        """Says whether a program is under way, or the main thread is inside JAX."""
        return filename.startswith(_ENGINE) or first_unfinished() is not None

    def farewell(self, text: str) -> None:
        """Tells the others why this worker ends."""
        self._farewell(text)
