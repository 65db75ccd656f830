"""The clusters for tests of custom loops, and helpers for functions in workers."""

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
    """Runs a test in turn on each backend, with 2 or 3 replicas on one worker, and with 2 workers."""
    return _parametrize(BACKENDS)(test)


def each_cluster_of(backend: str) -> Any:
    """Works like `each_cluster`, but for one backend; the test still receives the backend."""
    return _parametrize([backend])


def on_workers(
    backend: str, num_workers: int, num_replicas: int, fn: Any, *args: Any, timeout: float = 100.0
) -> list[Any]:
    """Calls `fn(num_replicas, *args)` in all workers; returns one result per worker."""
    return run(backend, num_workers, fn, num_replicas, *args, timeout=timeout)


def on_replicas(
    backend: str, num_workers: int, num_replicas: int, fn: Any, *args: Any, timeout: float = 100.0
) -> list[Any]:
    """Calls a function that returns one entry per local replica in all workers; returns all entries."""
    everyone = on_workers(backend, num_workers, num_replicas, fn, *args, timeout=timeout)
    assert [len(results) for results in everyone] == [num_replicas // num_workers] * num_workers
    return [result for results in everyone for result in results]


# For functions in workers -----------------------------------------------------------------------------------


def numpy_of(value: Any) -> Any:
    """Converts the tensors in a structure to NumPy arrays; keeps other values."""
    import keras

    def convert(leaf: Any) -> Any:
        return keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf

    return keras.tree.map_structure(convert, value)


def number_of(value: Any) -> int:
    """Converts a variable or tensor to a Python integer."""
    import keras

    return int(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def local_results(strategy: Any, value: Any) -> list[Any]:
    """Returns the components of a value as NumPy arrays, one array per local replica."""
    return [numpy_of(part) for part in strategy.experimental_local_results(value)]


def per_replica(strategy: Any, value_fn: Any) -> Any:
    """Creates one value per replica with `value_fn(replica_id)`; converts arrays to tensors."""
    import keras
    import numpy as np

    def convert(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    return strategy.experimental_distribute_values_from_function(
        lambda context: keras.tree.map_structure(convert, value_fn(context.replica_id_in_sync_group))
    )
