"""What N workers on one backend have saved, M workers on another restore: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint import jobs
from tests.processes import BACKENDS, run

pytestmark = pytest.mark.xdist_group("pool-checkpoint")


def assert_equal(restored, saved):
    for values in restored:
        for value, wanted in zip(values, saved, strict=True):
            assert value.shape == wanted.shape
            np.testing.assert_array_equal(value, wanted)


def save(backend, num_workers, folder):
    results = run(backend, num_workers, jobs.save_in_the_middle, str(folder))
    assert len({path for path, _ in results}) == 1
    return results[0]


def test_any_number_of_workers_restores_what_any_number_saved(tmp_path):
    saved = {}
    cells = []
    # In an order that starts few pools: two are kept.
    for number in (1, 2, 3, 2, 1):
        if number not in saved:
            saved[number] = save("torch", number, tmp_path / str(number))
        for other, (path, values) in saved.items():
            if (other, number) not in cells:
                assert_equal(run("torch", number, jobs.restore, path), values)
                cells.append((other, number))
    assert sorted(cells) == [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]


def test_any_backend_restores_what_any_backend_saved(tmp_path):
    saved = {name: save(name, 2, tmp_path / name) for name in BACKENDS}
    for name in reversed(BACKENDS):
        for path, values in saved.values():
            assert_equal(run(name, 2, jobs.restore, path), values)
