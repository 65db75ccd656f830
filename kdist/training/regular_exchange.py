"""`RegularExchange`, which selects steps after which all workers exchange values, at a given interval in seconds."""

from __future__ import annotations

import time
from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import gather


class RegularExchange:
    """Lets workers exchange values regularly, after the same steps. Other steps cost almost nothing.

    Clocks differ between workers, but step counts do not. Therefore, at each exchange the chief measures the
    duration of the last steps, and sets the number of steps until the next exchange.

    Args:
        runtime: The runtime of the workers, or `None` for this process only.
        seconds: The approximate time between exchanges.
    """

    def __init__(self, runtime: Runtime | None, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._interval = 1
        self._last: tuple[int, float] | None = None
        self._next = 0

    def is_due(self, num_steps: int) -> bool:
        """Returns whether the workers exchange values after `num_steps` steps. The result is equal on all workers."""
        return num_steps >= self._next

    def exchange(self, num_steps: int, value: Any) -> list[Any]:
        """Exchanges a JSON value, and returns the values of all workers in the order of their indices."""
        now = time.monotonic()
        interval = 1
        if self._last is not None:
            steps, since = num_steps - self._last[0], now - self._last[1]
            # At most twice the last interval, because steps may become slower.
            interval = max(1, min(int(steps / max(since, 1e-6) * self._seconds), 2 * self._interval))
        mine = [interval, value]
        said = [mine] if self._runtime is None else gather(self._runtime, mine)
        self._interval = said[0][0]
        self._last, self._next = (num_steps, now), num_steps + self._interval
        return [theirs for _, theirs in said]
