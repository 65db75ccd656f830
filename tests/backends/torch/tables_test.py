"""Gradients of rows that a tensor requests from parameter servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import run


def in_worker_penalized_rows() -> list[list[float]]:
    """Returns the gradients of looked-up rows, for a loss with a penalty for their gradient."""
    from types import SimpleNamespace

    import torch

    from kdist.backends.torch.tables import RowGradient, Table

    variable = SimpleNamespace(shape=(8, 1), dtype="float32", trainable=True)
    rows = np.arange(8, dtype="float32")[:, None]
    record: Any = SimpleNamespace(
        is_here=lambda: False,
        rows=lambda ids: rows[ids],
        served=SimpleNamespace(generation=0),
        variable=lambda: variable,
    )
    table = Table.of_record(record, record.variable())
    loss = (torch.nn.functional.embedding(torch.tensor([1, 3]), table) ** 3).sum()
    (inner,) = torch.autograd.grad(loss, [table], create_graph=True)
    (gradient,) = torch.autograd.grad(loss + (inner**2).sum(), [table])
    assert isinstance(gradient, RowGradient)
    return gradient.row_values.tolist()


@pytest.mark.kills("torch_gradients_of_rows_are_constants")
def test_gradients_of_rows_are_differentiable() -> None:
    # The gradient of x³ + (3 x²)² is 3 x² + 36 x³.
    assert run("torch", 1, in_worker_penalized_rows)[0] == [[3.0 + 36.0], [27.0 + 972.0]]
