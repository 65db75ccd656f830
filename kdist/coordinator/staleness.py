"""Limits how many closures run concurrently, so that no closure computes on variables that are too old."""

from __future__ import annotations


class Staleness:
    """Decides when another closure may begin.

    A closure reads variables when it begins, and changes them when it ends. Updates in between make its own
    update stale. They come from closures that already run when it begins, or that begin while it runs.

    Args:
        most: The maximum staleness, in updates; `None` for no limit. With 0, closures run one after another.

    Example:

    >>> from kdist.coordinator.staleness import Staleness
    >>> bound = Staleness(1)
    >>> bound.begin("a"), bound.begin("b"), bound.begin("c")
    (True, True, False)
    >>> bound.end("a")
    >>> bound.begin("c")  # it would be the second beside "b"
    False
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.is_in_turn = most == 0
        """Whether closures run one after another."""
        # For each running closure, the number of other closures that ran when it began or have begun since.
        self._beside: dict[object, int] = {}

    def begin(self, closure: object) -> bool:
        """Returns whether a closure may begin now. If so, it counts as running."""
        if self._most is not None:
            others = max(self._beside.values(), default=0)
            if len(self._beside) > self._most or (self._beside and others + 1 > self._most):
                return False
        for other in self._beside:
            self._beside[other] += 1
        self._beside[closure] = len(self._beside)
        return True

    def end(self, closure: object) -> None:
        """Marks a closure as no longer running, because it is done or will be repeated."""
        self._beside.pop(closure, None)
