"""`run`, a function in several workers, and `Workers`, pools that are kept from one test to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster import keras_backend_name
from kdist.testing.pool import WorkerPool

_MOST = 3  # pools that are kept at a time


def run(
    fn: Callable[..., Any],
    num_workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, object] | None = None,
    timeout: float = 120.0,
) -> list[Any]:
    """Runs a function in several fresh worker processes, as a test does, and returns their results.

    Unlike with `kdist.launch`, what the workers print is shown if one fails, with the traceback of each.

    Args:
        fn: The function. Import Keras inside it: this process's backend is not the workers'.
        num_workers: How many workers.
        args: Its positional arguments, the same for all workers.
        kwargs: Its keyword arguments.
        backend: The Keras backend of the workers; by default what `KERAS_BACKEND` says.
        env: More environment variables.
        timeout: How many seconds it may take, with the start of the workers.

    Returns:
        What it returned, one entry a worker.

    Raises:
        WorkerFailure: If it failed in a worker.
        PoolTimeoutError: If a worker does not answer in time; the message shows what each was doing.
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
    """Pools of workers that are kept: called with what a test needs, it returns a `WorkerPool`.

    One that has failed is replaced, since its workers may be out of step; so is the one that was not used for longest,
    when there are too many. It is a context manager, at whose end all of them are closed.

    Args:
        make: Makes a pool of what it is called with.
        most: How many pools are kept at a time.

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
        """Returns a pool, the same one as before where it was asked for the same.

        Args:
            num_workers: How many workers.
            backend: Their Keras backend; by default what `KERAS_BACKEND` says.
            env: More environment variables.
            plain: Whether they are for functions that make no strategy, and must have run none that does.
        """
        # A test may have set KERAS_BACKEND, for itself alone.
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
        """The processes of all workers."""
        return frozenset(pid for pool in self._pools.values() for pid in pool.pids)

    def close(self) -> None:
        """Ends all workers. It may be called twice."""
        while self._pools:
            self._pools.popitem()[1].close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
