"""Asserts in workers show their values."""

from __future__ import annotations

import pytest

from kdist.testing import WorkerFailure
from tests.processes import each_backend, start_pool


def fails(one: int, two: int) -> None:
    assert one + 1 == two


@each_backend
def test_a_failing_assert_in_a_worker_shows_both_values(backend: str) -> None:
    pool = start_pool(1, backend)
    try:
        with pytest.raises(WorkerFailure, match=r"AssertionError: assert \(41 \+ 1\) == 43"):
            pool.run(fails, 41, 43)
    finally:
        pool.close()
