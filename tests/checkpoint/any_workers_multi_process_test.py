"""What N workers on one backend have saved, M workers on another restore: the same numbers."""

from __future__ import annotations

import itertools

import numpy as np

from tests.checkpoint import jobs
from tests.processes import BACKENDS, run

JOBS = list(itertools.product(BACKENDS, (1, 2, 3)))


def visit(job, folder, saved):
    """Saves and restores on the workers of a job; all must find what was saved. Returns what it has saved."""
    results = run(*job, jobs.save_and_restore, folder, [path for path, _ in saved])
    own = [results[0][0]] if folder is not None else []
    assert len({worker_saved and worker_saved[0] for worker_saved, _ in results}) == 1
    for _, restored in results:
        for values, (_, wanted) in zip(restored, own + saved, strict=True):
            for value, number in zip(values, wanted, strict=True):
                assert value.shape == number.shape
                np.testing.assert_array_equal(value, number)
    return own


def test_any_workers_restore_what_any_others_saved(tmp_path):
    saved = {}
    done = set()
    # There and back, so that each kind of workers is started twice at the most.
    for job in (*JOBS, *JOBS[-2::-1]):
        new = [other for other in saved if (other, job) not in done]
        folder = None if job in saved else str(tmp_path / f"{job[0]}-{job[1]}")
        for own in visit(job, folder, [saved[other] for other in new]):
            saved[job] = own
            new.append(job)
        done |= {(other, job) for other in new}
    assert done == set(itertools.product(JOBS, JOBS)), "3 backends x 3 numbers of workers, there and back"
