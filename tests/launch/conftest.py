"""The `run` fixture starts jobs of `kdist run`, and kills the jobs that a test leaves running."""

from __future__ import annotations

import pytest

from tests.launch.jobs import Job


@pytest.fixture
def run(tmp_path):
    jobs = []

    def start(script, *options, **kwargs):
        jobs.append(Job(tmp_path, script, *options, **kwargs))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(10)
