"""What N workers on one backend have saved, M workers on another restore: the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import jobs
from tests.processes import BACKENDS, run

JOBS = list(itertools.product(BACKENDS, (1, 2, 3)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[Any]]]:
    """A checkpoint of each kind of job: its path, and the values in it."""
    return [save(*job, tmp_path_factory.mktemp(f"{job[0]}-{job[1]}")) for job in JOBS]


def save(backend: str, num_workers: int, folder: Path) -> tuple[str, list[Any]]:
    results = run(backend, num_workers, jobs.save_and_restore, str(folder), [])
    path, values = results[0][0]
    for (other_path, _), (restored,) in results:
        assert other_path == path
        assert_equal(restored, values)
    return path, values


def assert_equal(values: list[Any], wanted: list[Any]) -> None:
    for value, number in zip(values, wanted, strict=True):
        assert value.shape == number.shape
        np.testing.assert_array_equal(value, number)


@pytest.mark.timeout(400)  # the first one waits for all that is saved
@pytest.mark.parametrize(("backend", "num_workers"), JOBS, ids=[f"{b}-{n}" for b, n in JOBS])
@pytest.mark.xdist_group("any-workers")
def test_workers_restore_what_any_others_saved(
    backend: str, num_workers: int, saved: list[tuple[str, list[Any]]]
) -> None:
    paths = [path for path, _ in saved]
    for _, restored in run(backend, num_workers, jobs.save_and_restore, None, paths):
        for values, (_, wanted) in zip(restored, saved, strict=True):
            assert_equal(values, wanted)
