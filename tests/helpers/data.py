"""Data for small models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def make_data(rows: int = 24, columns: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, and targets with one column that a model can learn. All rows differ."""
    x = np.random.RandomState(0).randn(rows, columns).astype("float32")
    return x, x[:, :1] * 2 - x[:, 1:2]


def in_batches(x: np.ndarray, y: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the rows in batches of these sizes."""
    ends = np.cumsum(sizes)
    return [(x[end - size : end], y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def py_dataset(batches: Sequence[Any], workers: int = 1) -> Any:
    """Returns the batches as a `keras.utils.PyDataset`."""
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    return Batches(workers=workers)


def loader(x: np.ndarray, y: np.ndarray, **options: Any) -> Any:
    """Returns the rows as a `DataLoader` with these options."""
    from torch import from_numpy
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(from_numpy(x), from_numpy(y)), **options)
