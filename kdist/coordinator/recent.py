"""A cache of recent functions, which coordinator and worker use in the same order and with equal content."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

_MOST = 64


class Recent:
    """A cache that keeps the most recently used values.

    Example:

    >>> from kdist.coordinator.recent import Recent
    >>> recent = Recent(most=2)
    >>> for name in ("a", "b", "a", "c"):
    ...     recent.put(name, name.upper())
    >>> recent.get("a"), recent.get("b")
    ('A', None)
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._values: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Returns a value, or `None`, and marks it as most recently used."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: object) -> None:
        """Adds a value. If the cache is full, removes the least recently used value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()
