"""Code without kdist, with which `kdist bench` compares: the only place outside of `backends/` that imports frameworks.

The file of each backend contains `all_reduce(strategy, count)`. It returns a function that sums `count` float32 numbers
over the workers with the framework's own all-reduce. `wait(result)` waits for a device. A file with loops written by
hand also contains `train(kind, prepare, batch_size)`. It joins the workers, and returns a function that trains an epoch
and returns its loss. `prepare` returns the compiled model and the data of all workers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras


def native() -> ModuleType:
    """Returns the file of the current backend."""
    return importlib.import_module(f"{__name__}.{keras.backend.backend()}")


def parts_of(data: object, batch_size: int, index: int, count: int) -> Iterator[Any]:
    """Yields a worker's part of each global batch, given its index and the number of workers."""
    rows = len(keras.tree.flatten(data)[0])
    each = min(batch_size, rows) // count
    own = index * each
    for first in range(own, own + rows - each * count + 1, each * count):  # equally often on each worker
        yield keras.tree.map_structure(lambda array, first=first: array[first : first + each], data)
