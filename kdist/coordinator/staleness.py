"""How many closures may run beside each other, so that none computes on variables that are too old."""

from __future__ import annotations


class Staleness:
    """Says when another closure may begin.

    A closure reads variables as it begins and changes them as it ends. What others change in between makes its update
    stale: at most as many updates as there were closures running when it began, or that began while it ran.

    Args:
        most: How stale an update may be; `None` for any number. With 0, closures run one after the other.

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
        """Whether closures run one after the other."""
        # Of each closure that runs, how many others ran as it began, or have begun since.
        self._beside: dict[object, int] = {}

    def begin(self, closure: object) -> bool:
        """Notes that a closure begins, if it may; says whether it does."""
        if self._most is not None:
            others = max(self._beside.values(), default=0)
            if len(self._beside) > self._most or (self._beside and others + 1 > self._most):
                return False
        for other in self._beside:
            self._beside[other] += 1
        self._beside[closure] = len(self._beside)
        return True

    def end(self, closure: object) -> None:
        """Notes that a closure has ended, or is to begin anew."""
        self._beside.pop(closure, None)
