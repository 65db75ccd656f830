"""The functions that were used last: coordinator and worker use them in one order, and forget the same ones."""

from __future__ import annotations

import collections
from typing import Any

_MOST = 64


class Recent:
    """A few values by their keys: those that were asked for last.

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
        self._values: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def get(self, key: Any) -> Any:
        """Returns a value, or `None`; it is the one that was used last."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Keeps a value, and forgets the one that was not used for longest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Forgets all."""
        self._values.clear()
