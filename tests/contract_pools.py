"""The worker processes of the contract's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kdist.testing import WorkerPool
from tests.contract import CONFIGURATIONS, make_strategy
from tests.helpers.processes import start_pool

# Long enough to compile the first step on a busy machine. After a hang, the error contains the stacks of all workers.
TIMEOUT = 120
P = ParamSpec("P")
R = TypeVar("R")


class Pools:
    """The worker processes of one backend and configuration, kept until a test needs a different pair."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._pools: list[WorkerPool] = []

    def get(self, backend: str, configuration: str) -> WorkerPool:
        """Returns the workers, and starts them if necessary."""
        if self._key != (backend, configuration):
            self.close()
            self._key = (backend, configuration)
            self._pools.append(start_pool(CONFIGURATIONS[configuration].num_workers, backend, TIMEOUT))
            # Creates the strategy before any computation, as a user's script does.
            self._pools[0].run(_prepare, configuration)
        return self._pools[0]

    def plain(self) -> WorkerPool:
        """Returns a process that computes results on one device. Most of these results are already cached in files."""
        if len(self._pools) < 2:
            assert self._key is not None
            self._pools.append(start_pool(1, self._key[0], TIMEOUT, plain=True))
        return self._pools[1]

    def close(self) -> None:
        while self._pools:
            self._pools.pop().close()
        self._key = None


def _prepare(configuration: str) -> None:
    make_strategy(configuration)


def without_kdist(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function, and checks that the process has not imported the modules of kdist that change Keras."""
    result = function(*args, **kwargs)
    touching = ("kdist.keras_hooks", "kdist.strategies", "kdist.training")
    found = [module for module in sys.modules if module.startswith(touching)]
    assert not found, f"An oracle must not run in a process in which kdist touches Keras: {found}"
    return result
