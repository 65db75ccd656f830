"""Data for small models."""

from __future__ import annotations

import numpy as np


def make_data(rows: int = 24, columns: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and targets with one column, of which a model can learn something; no two rows are alike."""
    x = np.random.RandomState(0).randn(rows, columns).astype("float32")
    return x, x[:, :1] * 2 - x[:, 1:2]


def in_batches(x: np.ndarray, y: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows in batches of these sizes."""
    ends = np.cumsum(sizes)
    return [(x[end - size : end], y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
