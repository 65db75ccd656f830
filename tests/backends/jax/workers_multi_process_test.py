"""Workers that join, fail, die or leave, as processes of their own without the launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist.testing import free_ports

pytest.importorskip("jax")

_SCRIPT = Path(__file__).with_name("worker_script.py")
_ROOT = Path(__file__).parents[3]
# What the issue promises, plus what a busy machine takes to notice and to print a traceback.
_PROMISED = 15.0


class Job:
    """Workers of one cluster."""

    def __init__(
        self,
        what: str,
        whom: int,
        num_workers: int = 2,
        skip: int | None = None,
        timeout: int = 300,
        addresses: list[str] | None = None,
    ) -> None:
        self.addresses = addresses or [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.outputs: dict[int, str] = {}
        self.ended: dict[int, float] = {}
        for index in range(num_workers):
            if index == skip:
                continue
            task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": index}}
            environ = {
                **os.environ,
                "TF_CONFIG": json.dumps(task),
                "KERAS_BACKEND": "jax",
                "KDIST_JOIN_TIMEOUT": str(timeout),
                "PYTHONPATH": str(_ROOT),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-u", str(_SCRIPT), what, str(whom)]
            self.processes[index] = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

    def wait(self, timeout: float = 120.0) -> dict[int, int]:
        """Waits for all; returns their exit codes."""
        deadline = time.monotonic() + timeout
        for index, process in self.processes.items():
            self.outputs[index] = process.communicate(timeout=deadline - time.monotonic())[0]
            self.ended[index] = time.time()
        return {index: process.returncode for index, process in self.processes.items()}

    def name(self, index: int) -> str:
        return f"worker {index} ({self.addresses[index]})"

    def happened(self, index: int) -> float:
        """When it happened to the worker, or when the others were at that step."""
        return float(self.outputs[index].split("BEGAN ")[1].split()[0])

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


@pytest.mark.parametrize("whom", [0, 1])
def test_a_killed_worker_is_named(jobs: list[Job], whom: int) -> None:
    jobs.append(job := Job("kill", whom))
    codes = job.wait()
    assert codes[whom] == -signal.SIGKILL
    assert codes[1 - whom] > 0
    assert f"The job cannot go on without {job.name(whom)}, which has died" in job.outputs[1 - whom]
    assert job.ended[1 - whom] - job.happened(whom) < _PROMISED


def test_the_others_of_three_name_the_same_worker(jobs: list[Job]) -> None:
    jobs.append(job := Job("kill", 2, num_workers=3))
    codes = job.wait()
    assert codes[2] == -signal.SIGKILL
    assert codes[0] > 0 and codes[1] > 0
    for index in (0, 1):
        assert f"without {job.name(2)}, which has died" in job.outputs[index]
    assert any("WEIGHTS True" in job.outputs[index] for index in (0, 1))


def test_a_worker_that_stands_still_ends_the_others(jobs: list[Job]) -> None:
    """As where its machine has lost power: nobody closes the connections."""
    jobs.append(job := Job("stop", 1))
    output, _ = job.processes[0].communicate(timeout=180)
    ended = time.time()
    assert job.processes[0].returncode == 1
    assert f"without {job.name(1)}, which has died or cannot be reached" in output
    assert ended - float(output.split("BEGAN ")[1].split()[0]) < _PROMISED + 5


@pytest.mark.parametrize("whom", [0, 1])
def test_an_error_on_one_worker_ends_the_others_and_is_told(jobs: list[Job], whom: int) -> None:
    jobs.append(job := Job("raise", whom))
    assert job.wait() == {0: 1, 1: 1}
    assert f"without {job.name(whom)}, which has failed: ValueError: disk full" in job.outputs[1 - whom]
    assert job.ended[1 - whom] - job.happened(whom) < _PROMISED


@pytest.mark.parametrize("whom", [0, 1])
def test_a_worker_that_exits_ends_the_others(jobs: list[Job], whom: int) -> None:
    jobs.append(job := Job("exit", whom))
    assert job.wait() == {whom: 3, 1 - whom: 1}
    assert f"without {job.name(whom)}, which has ended before the others" in job.outputs[1 - whom]


@pytest.mark.parametrize("whom", [0, 1])
def test_a_worker_may_end_earlier_than_the_other(jobs: list[Job], whom: int) -> None:
    jobs.append(job := Job("late", whom))
    assert job.wait() == {0: 0, 1: 0}
    for output in job.outputs.values():
        assert "DONE" in output
        for word in ("Gloo", "recoverable", "Terminating", "Traceback"):
            assert word not in output


def test_joining_twice(jobs: list[Job]) -> None:
    jobs.append(job := Job("twice", 0))
    assert job.wait() == {0: 0, 1: 0}
    assert all("REFUSED A process can join one cluster only" in output for output in job.outputs.values())


@pytest.mark.parametrize("missing", [0, 1])
def test_a_worker_that_never_comes_is_named(jobs: list[Job], missing: int) -> None:
    jobs.append(job := Job("none", 0, skip=missing, timeout=6))
    assert job.wait(90) == {1 - missing: 1}
    output = job.outputs[1 - missing]
    assert "WorkerTimeoutError: All 2 workers must come within 6 s" in output
    assert f"but {job.name(missing)} did not" in output
    assert "KDIST_JOIN_TIMEOUT" in output


def test_the_port_of_the_chief_is_in_use(jobs: list[Job]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = f"127.0.0.1:{held.getsockname()[1]}"
        jobs.append(job := Job("none", 0, skip=1, addresses=[taken, "127.0.0.1:9"]))
        assert job.wait(60) == {0: 1}
    assert "ClusterConfigError: Port" in job.outputs[0]


def test_too_late_to_join(jobs: list[Job]) -> None:
    jobs.append(job := Job("too-late", 0, skip=1))
    assert job.wait(90) == {0: 1}
    assert "StrategyScopeError: The workers must be joined before JAX has computed anything" in job.outputs[0]
