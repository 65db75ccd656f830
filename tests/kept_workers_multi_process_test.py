"""Failed assertions in workers show their values, and tests must restore the settings of workers that are kept."""

from __future__ import annotations

import logging

import pytest

from kdist.testing import WorkerFailure
from tests.helpers.processes import each_backend, run, start_pool


def fails(one: int, two: int) -> None:
    assert one + 1 == two


@pytest.mark.kills(asserts_of_workers_without_values="[torch]")
@each_backend
def test_a_failing_assert_in_a_worker_shows_both_values(backend: str) -> None:
    pool = start_pool(1, backend)
    try:
        with pytest.raises(WorkerFailure, match=r"AssertionError: assert \(41 \+ 1\) == 43"):
            pool.run(fails, 41, 43)
    finally:
        pool.close()


def changes_the_level() -> None:
    logging.getLogger("kdist").setLevel(logging.ERROR)


@pytest.mark.kills("settings_left_in_kept_workers")
def test_settings_that_a_test_leaves_in_a_kept_worker_are_an_error() -> None:
    with pytest.raises(WorkerFailure, match="The test left settings .*level of kdist's logger.*, 40"):
        run("torch", 1, changes_the_level)
