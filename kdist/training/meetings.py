"""`Meetings`: steps after which the workers decide something together, about as often as a clock says."""

from __future__ import annotations

import time
from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather


class Meetings:
    """Lets workers exchange something every so often, after the same steps, for next to nothing in between.

    Clocks differ, steps do not: at each meeting the chief says, from how long the last steps took, after how
    many more the next one is.

    Args:
        runtime: The workers; `None` for this process alone.
        seconds: About how long from one meeting to the next.
    """

    def __init__(self, runtime: Runtime | None, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._interval = 1
        self._last: tuple[int, float] | None = None
        self._next = 0

    def is_due(self, num_steps: int) -> bool:
        """Says whether the workers meet after so many steps; the same on all of them."""
        return num_steps >= self._next

    def meet(self, num_steps: int, value: Any) -> list[Any]:
        """Exchanges a JSON value with all workers after so many steps; returns one a worker, in their order."""
        now = time.monotonic()
        interval = 1
        if self._last is not None:
            steps, since = num_steps - self._last[0], now - self._last[1]
            # No more than twice as far as the last time: steps may become slower.
            interval = max(1, min(int(steps / max(since, 1e-6) * self._seconds), 2 * self._interval))
        mine = [interval, value]
        said = [mine] if self._runtime is None else gather(self._runtime, mine)
        self._interval = said[0][0]
        self._last, self._next = (num_steps, now), num_steps + self._interval
        return [theirs for _, theirs in said]
