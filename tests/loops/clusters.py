"""The clusters on which the tests of custom loops run, and what their functions in workers share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.processes import BACKENDS, run

CLUSTERS = ((1, 2), (1, 3), (2, 2))


def _parametrize(backends: Sequence[str]) -> Any:
    params = [
        pytest.param(backend, workers, replicas, id=f"{replicas}-replicas-on-{workers}-{backend}")
        for (workers, replicas), backend in itertools.product(CLUSTERS, backends)
    ]
    each = pytest.mark.parametrize(("backend", "num_workers", "num_replicas"), params, scope="module")
    return lambda test: pytest.mark.in_turn(len(params))(each(test))


def each_cluster(test: Any) -> Any:
    """Runs a test on three backends, with 2 and 3 replicas of one worker and with 2 workers of one each, in turn."""
    return _parametrize(BACKENDS)(test)


def each_cluster_of(backend: str) -> Any:
    """As `each_cluster`, for behavior of one backend; the test still receives the backend."""
    return _parametrize([backend])


def on_workers(
    backend: str, num_workers: int, num_replicas: int, fn: Any, *args: Any, timeout: float = 100.0
) -> list[Any]:
    """Calls `fn(num_replicas, *args)` in all workers; returns one result per worker."""
    return run(backend, num_workers, fn, num_replicas, *args, timeout=timeout)


def on_replicas(
    backend: str, num_workers: int, num_replicas: int, fn: Any, *args: Any, timeout: float = 100.0
) -> list[Any]:
    """As `on_workers`, for functions that return a list with an entry for each local replica: of all."""
    everyone = on_workers(backend, num_workers, num_replicas, fn, *args, timeout=timeout)
    assert [len(results) for results in everyone] == [num_replicas // num_workers] * num_workers
    return [result for results in everyone for result in results]


# For functions in workers --------------------------------------------------------------------------------------


def numpy_of(value: Any) -> Any:
    """A structure of tensors as NumPy arrays; anything else as it is."""
    import keras

    def convert(leaf: Any) -> Any:
        return keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf

    return keras.tree.map_structure(convert, value)


def number_of(value: Any) -> int:
    """A variable or tensor as a Python number."""
    import keras

    return int(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def local_results(strategy: Any, value: Any) -> list[Any]:
    """The components of a value as NumPy arrays, one a local replica."""
    return [numpy_of(part) for part in strategy.experimental_local_results(value)]


def per_replica(strategy: Any, value_fn: Any) -> Any:
    """One value for each replica, made by `value_fn(replica_id)`; arrays become tensors."""
    import keras
    import numpy as np

    def convert(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    return strategy.experimental_distribute_values_from_function(
        lambda context: keras.tree.map_structure(convert, value_fn(context.replica_id_in_sync_group))
    )
