"""Computes the gradient of dropout by hand, from its outputs after a linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def masks_of(records: Mapping[int, np.ndarray], x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Returns the masks of `Dropout(0.5)`, computed from the outputs of each replica."""
    kept, outputs = 2 * x @ kernel, np.concatenate([record for _, record in sorted(records.items())])
    masks = (outputs / kept).round()
    np.testing.assert_allclose(outputs, masks * kept, rtol=1e-4, atol=1e-5)
    return masks


def gradient(x: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Returns the gradient of the mean of all outputs with respect to the kernel."""
    return x.T @ (2 * masks) / masks.size
