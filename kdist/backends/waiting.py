"""Says from time to time for whom this process waits, while the tasks of a job come together."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kdist.cluster import logs
from kdist.cluster.roles import listed

_FIRST = 5.0  # seconds until it is said first; each pause is as long as all before it


class Waiting:
    """Who is missing, from when on, and what is said of it.

    Args:
        names: How messages name the tasks.
        timeout: Seconds in which all must have come.
    """

    def __init__(self, names: Sequence[str], timeout: float) -> None:
        self.missing: frozenset[int] = frozenset()
        """The numbers of those that were missing when somebody last looked."""
        self._names = names
        self._timeout = timeout
        self._began = time.monotonic()
        self._next = _FIRST

    @property
    def is_due(self) -> bool:
        """Whether something is to be said, for those that look only then."""
        return self._waited >= self._next

    def note(self, missing: Collection[int]) -> None:
        """Takes down who is missing, and says it where it is time to."""
        self.missing = frozenset(missing)
        waited = self._waited
        if not missing or not self._next <= waited < self._timeout:
            return
        while self._next <= waited:
            self._next *= 2
        names = [self._names[index] for index in sorted(missing) if index < len(self._names)]
        logs.notice("waiting for %s to join (%.0f of %g s)", listed(names), waited, self._timeout)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began
