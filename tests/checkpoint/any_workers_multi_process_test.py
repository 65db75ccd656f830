"""M workers on one backend restore the same values that N workers on another backend saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import jobs
from tests.helpers.processes import BACKENDS, full_unless, run
from tests.turn import turn

JOBS = list(itertools.product((1, 2, 3), BACKENDS))
# `make test` runs each backend and each number of workers.
PAIRS = [(number, BACKENDS[(number + turn()) % 3]) for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, list[Any]]]:
    """Returns a checkpoint of each job that runs today: its path, and the values in it."""
    items = [item for item in request.session.items if item.path == request.path]
    jobs = [item.callspec.params for item in items if isinstance(item, pytest.Function)]
    return [save(**job, folder=tmp_path_factory.mktemp("saved")) for job in jobs]


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


@pytest.mark.in_turn(4)  # not 3, because the backends of `PAIRS` also change with the turn
@pytest.mark.timeout(400)  # the first test waits for all saves
@pytest.mark.parametrize(
    ("num_workers", "backend"),
    [pytest.param(*job, id=f"{job[1]}-{job[0]}", marks=full_unless(job in PAIRS)) for job in JOBS],
)
@pytest.mark.xdist_group("any-workers")
def test_workers_restore_what_any_others_saved(
    backend: str, num_workers: int, saved: list[tuple[str, list[Any]]]
) -> None:
    paths = [path for path, _ in saved]
    for _, restored in run(backend, num_workers, jobs.save_and_restore, None, paths):
        for values, (_, wanted) in zip(restored, saved, strict=True):
            assert_equal(values, wanted)
