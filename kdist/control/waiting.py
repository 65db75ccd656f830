"""Logs which tasks this process is waiting for while a job starts."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kdist.cluster import logs
from kdist.cluster.roles import listed

_FIRST = 5.0  # seconds until the first log line; the total waiting time doubles for each further line


class Waiting:
    """Tracks the missing tasks and logs them at growing intervals. After `timeout` seconds, the job fails."""

    def __init__(self, names: Sequence[str], timeout: float) -> None:
        self.missing: frozenset[int] = frozenset()
        """The indices of the tasks that were missing at the last call of `note`."""
        self._names = names
        self.timeout = timeout
        self._began = time.monotonic()
        self._next = _FIRST

    @property
    def is_due(self) -> bool:
        """Whether it is time for a log line. Callers can skip the search for missing tasks until then."""
        return self._waited >= self._next

    def note(self, missing: Collection[int]) -> None:
        """Updates the missing tasks, and logs them when it is time."""
        self.missing = frozenset(missing)
        waited = self._waited
        if not missing or not self._next <= waited < self.timeout:
            return
        while self._next <= waited:
            self._next *= 2
        names = [self._names[index] for index in sorted(missing) if index < len(self._names)]
        logs.notice("waiting for %s to join (%.0f of %g s)", listed(names), waited, self.timeout)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began
