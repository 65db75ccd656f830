"""The pytest plugin of kdist: fixtures for tests that need several workers.

pytest loads it in every session through its entry point, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kdist.testing import Workers


@pytest.fixture(scope="session")
def kdist_workers() -> Iterator[Workers]:
    """Provides worker processes for the whole session: `kdist_workers(2, backend="jax").run(fn)`."""
    from kdist.testing import Workers

    with Workers() as workers:
        yield workers


@pytest.fixture
def kdist_no_leaks(kdist_workers: Workers) -> Iterator[None]:
    """Fails a test that leaves a process (except kept workers), thread, port or changed variable behind."""
    from kdist.testing import check, snapshot

    before = snapshot()
    yield
    check(dataclasses.replace(before, processes=before.processes | kdist_workers.pids))
