"""Runs functions in worker processes that the test modules share.

The pytest process imports no framework: a module that needs a framework runs functions in a `WorkerPool`. The
next test with the same backend and number of workers uses the same pool. Workers are forked from a process
that has imported the backend (`zygote.py`). With `--no-forks` they start like a user's workers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import pytest

from kdist.testing import WorkerPool, Workers
from tests.helpers import rewriting
from tests.helpers.environment import DESCRIBING
from tests.helpers.zygote import zygote

BACKENDS = ("tensorflow", "jax", "torch")
# A first step may have to compile on a busy machine. A hang ends after this time with all stacks printed,
# before pytest-timeout ends the test without them.
TIMEOUT = 150.0


def full_unless(is_pair: bool) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case: `make test` leaves it out unless it is a selected pair."""
    return [] if is_pair else [pytest.mark.full]


def each_backend_within(turns: int) -> Callable[[Any], Any]:
    """Returns a decorator that runs a test on all backends; `make test` needs some turns to run them all."""
    each = pytest.mark.parametrize("backend", BACKENDS, scope="module")
    return lambda test: pytest.mark.in_turn(turns)(each(test))


# `make test` runs the test on one backend, and on the next backend in the next turn.
each_backend = each_backend_within(len(BACKENDS))
# For long tests of whole programs.
each_backend_in_twelve_turns = each_backend_within(4 * len(BACKENDS))


# Whether the workers of pools are forked; false with `--no-forks`.
forks = True


class ForkedPool(WorkerPool):
    """A `WorkerPool` whose workers need not import their backend."""

    plain = False

    def _start(self, environ: Mapping[str, str], output: IO[bytes], connection: int) -> Any:
        assert self.backend is not None
        return zygote(self.backend, self.plain).fork(environ, output, output, None, connection)


class PlainPool(ForkedPool):
    """A `ForkedPool` whose processes keep Keras unchanged by kdist."""

    plain = True


def start_pool(num_workers: int, backend: str, timeout: float = TIMEOUT, plain: bool = False) -> WorkerPool:
    """Returns a new pool, which the caller closes. In a plain pool, kdist does not change Keras."""
    if forks:
        return (PlainPool if plain else ForkedPool)(num_workers, backend, timeout=timeout)
    pool = WorkerPool(num_workers, backend, timeout=timeout)
    pool.run(rewriting.install)
    return pool


def run(
    backend: str, num_workers: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Runs a function in all workers of a backend's pool, and returns a list with the result of each worker.

    The workers already have their strategies. A single worker has a `MirroredStrategy` on two CPU devices and
    a `CentralStorageStrategy` on three. Several workers have a `MultiWorkerMirroredStrategy`; see `strategy`.
    After a failure, the pool is closed, and the next test gets a new pool.
    """
    pool = _kept(num_workers, backend)
    try:
        return pool.run(_fresh, fn, *args, timeout=timeout)
    except BaseException:
        pool.close()
        raise


def run_plain(backend: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in a separate process where kdist does not change Keras, and returns its result."""
    pool = start_pool(1, backend, plain=True)
    try:
        return pool.run(_without_hooks, fn, *args)[0]
    finally:
        pool.close()


def _without_hooks(fn: Callable[..., Any], *args: Any) -> Any:
    result = fn(*args)
    hooks = sys.modules.get("kdist.keras_hooks")
    assert hooks is None or not hooks._installed, "The oracle's process contains kdist's hooks in Keras."
    return result


def _fresh(fn: Callable[..., Any], *args: Any) -> Any:
    import keras

    keras.utils.clear_session(free_memory=False)  # a garbage collection takes longer than many tests
    before = _settings()
    result = fn(*args)
    after = _settings()
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not left, f"The test left settings that the next test of this kept worker meets: {left}"
    return result


def _settings() -> dict[str, Any]:
    """Returns the settings that a test must restore in a kept worker."""
    import keras

    logger = logging.getLogger("kdist")
    return {
        "dtype policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "image data format": keras.config.image_data_format(),
        "level of kdist's logger": logger.level,
        "handlers of kdist's logger": [*logger.handlers],
        "working directory": os.getcwd(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            # TensorFlow sets the second kind when it is imported, which can be in the middle of a test.
            if name.startswith(DESCRIBING) and not name.startswith("TPU_ML_PLATFORM")
        },
        "handler of Ctrl-C": signal.getsignal(signal.SIGINT),
        "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
    }


_in_worker: dict[int, Any] = {}


def strategy(num_replicas: int = 2) -> Any:
    """Returns the strategy of a pool's worker. The first call makes it, before any computation.

    Args:
        num_replicas: 2 for mirrored variables, or 3 for variables on the second device only. With several
            workers there is only one strategy.
    """
    import kdist

    if not _in_worker:
        if int(os.environ["WORLD_SIZE"]) == 1:
            devices = [f"cpu:{i}" for i in range(3)]  # no device can be added later
            _in_worker[3] = kdist.experimental.CentralStorageStrategy(devices, devices[1])
            _in_worker[2] = kdist.MirroredStrategy(devices[:2])
        else:
            joined = kdist.MultiWorkerMirroredStrategy()
            _in_worker[joined.num_replicas_in_sync] = joined
    return _in_worker[num_replicas] if num_replicas in _in_worker else next(iter(_in_worker.values()))


def rank() -> int:
    """Returns the index of a pool's worker."""
    return int(os.environ["RANK"])


def scope(under_strategy: bool) -> Any:
    """Returns the scope of the worker's strategy, or a context that does nothing."""
    return strategy().scope() if under_strategy else contextlib.nullcontext()


def _prepare() -> None:
    strategy()  # not returned: a strategy cannot be pickled
    gc.collect()
    gc.freeze()  # keeps the frameworks' objects out of later garbage collections


def _prepared_pool(num_workers: int, backend: str, env: None) -> WorkerPool:
    pool = start_pool(num_workers, backend)
    try:
        pool.run(_prepare, timeout=TIMEOUT)
    except BaseException:
        pool.close()
        raise
    return pool


_kept = Workers(_prepared_pool)
atexit.register(_kept.close)
