"""`run` calls a function in several workers; `Workers` keeps pools of workers from one test to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster import keras_backend_name
from kdist.testing.pool import WorkerPool

_MOST = 3  # pools to keep


def run(
    fn: Callable[..., Any],
    num_workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, object] | None = None,
    timeout: float = 120.0,
) -> list[Any]:
    """Runs a function in several new worker processes, for a test, and returns the results.

    Unlike `kdist.launch`, it hides the workers' output. If workers fail, the error contains their tracebacks.

    Args:
        fn: The function. Import Keras inside it, because this process may use a different backend.
        num_workers: The number of workers.
        args: The positional arguments of the function, the same for all workers.
        kwargs: The keyword arguments of the function, the same for all workers.
        backend: The Keras backend of the workers; by default the backend in `KERAS_BACKEND`.
        env: Additional environment variables.
        timeout: Seconds to wait for all workers, including their start.

    Returns:
        A list with one result per worker.

    Raises:
        WorkerFailure: If the function fails in a worker.
        PoolTimeoutError: If a worker does not answer in time; the message shows the stacks of such workers.
        BackendError: If the backend is unknown or not installed.

    Example:

    >>> import os
    >>> from kdist.testing import run
    >>> run(lambda factor: factor * int(os.environ["RANK"]), num_workers=2, args=(10,))
    [0, 10]
    """
    with WorkerPool(num_workers, backend, env, timeout) as pool:
        return pool.run(fn, *args, **(kwargs or {}))


class Workers:
    """Keeps pools of workers: call it with the requirements of a test to get a `WorkerPool`.

    A pool where a function failed is replaced, because its workers may be out of step. If there are too many
    pools, the least recently used pool is closed. As a context manager, it closes all pools at the end.

    Args:
        make: Creates a pool from the number of workers, the backend and the environment variables.
        most: The maximum number of pools to keep.

    Example:

    >>> import os
    >>> from kdist.testing import Workers
    >>> with Workers() as workers:
    ...     first = workers(2).run(os.getpid)
    ...     workers(2).run(os.getpid) == first
    True
    """

    def __init__(self, make: Callable[..., WorkerPool] = WorkerPool, most: int = _MOST) -> None:
        self._make = make
        self._most = most
        self._pools: dict[tuple[Any, ...], WorkerPool] = {}

    def __call__(
        self,
        num_workers: int = 2,
        backend: str | None = None,
        env: Mapping[str, object] | None = None,
        *,
        plain: bool = False,
    ) -> WorkerPool:
        """Returns a pool, which is the same pool as before for the same arguments.

        Args:
            num_workers: The number of workers.
            backend: The Keras backend of the workers; by default the backend in `KERAS_BACKEND`.
            env: Additional environment variables.
            plain: Whether the pool runs only functions without a strategy.
        """
        # A test may have changed KERAS_BACKEND, so the name is part of the key.
        now = (backend or keras_backend_name()).lower()
        key = (num_workers, now, tuple(sorted((env or {}).items())), plain)
        pool = self._pools.pop(key, None)
        if pool is not None and pool.has_failed:
            pool.close()
        if pool is None or pool.broken:
            while len(self._pools) >= self._most:
                self._pools.pop(next(iter(self._pools))).close()
            pool = self._make(num_workers, backend, env)
        self._pools[key] = pool
        return pool

    @property
    def pids(self) -> frozenset[int]:
        """The process IDs of all workers."""
        return frozenset(pid for pool in self._pools.values() for pid in pool.pids)

    def close(self) -> None:
        """Terminates all workers. You can call it twice."""
        while self._pools:
            self._pools.popitem()[1].close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
