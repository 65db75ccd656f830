"""Workers that join, fail, die or leave, in separate processes without the launcher."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import Script, environments_of, local_addresses, started, tf_config

_SOURCE = Path(__file__).with_name("worker_script.py").read_text(encoding="utf-8")
# The promised seconds, plus the time that a busy machine needs to notice the loss and print a traceback.
_PROMISED = 15.0


class Job:
    """Workers of one cluster; an event happens to one worker."""

    def __init__(
        self,
        folder: Path,
        what: str,
        whom: int,
        num_workers: int = 2,
        skip: int | None = None,
        timeout: int = 300,
        addresses: list[str] | None = None,
    ) -> None:
        self.addresses = addresses or local_addresses(num_workers)
        self.workers: dict[int, Script] = {}
        env = {"KERAS_BACKEND": "jax", "KDIST_JOIN_TIMEOUT": str(timeout), "WHAT": what, "WHOM": str(whom)}
        for index in range(num_workers):
            if index != skip:
                task = {"TF_CONFIG": tf_config(self.addresses, index)}
                self.workers[index] = Script(folder, f"worker{index}", _SOURCE, env | task)

    def wait(self, timeout: float = 120.0) -> dict[int, int]:
        """Waits for all workers; returns their exit codes."""
        deadline = time.monotonic() + timeout
        return {
            index: worker.wait(max(0.1, deadline - time.monotonic()))
            for index, worker in self.workers.items()
        }

    def output(self, index: int) -> str:
        return self.workers[index].stdout() + self.workers[index].stderr()

    def name(self, index: int) -> str:
        return f"worker {index} ({self.addresses[index]})"

    def seconds(self, index: int, since: int) -> float:
        """Returns the seconds from the event, which worker `since` logs, to the end of a worker."""
        happened = float(self.output(since).split("BEGAN ")[1].split()[0])
        return self.workers[index].ended_at - happened


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Yields a function that starts jobs, and kills their workers after the test."""
    started: list[Job] = []

    def start(*args: Any, **options: Any) -> Job:
        started.append(Job(tmp_path, *args, **options))
        return started[-1]

    yield start
    for job in started:
        for worker in job.workers.values():
            worker.kill()


@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.in_turn(4)
def test_a_killed_worker_is_named(start: Callable[..., Job], whom: int) -> None:
    job = start("kill", whom)
    codes = job.wait()
    assert codes[whom] == -signal.SIGKILL
    assert codes[1 - whom] > 0
    assert f"The job lost {job.name(whom)}: it died" in job.output(1 - whom)
    assert job.seconds(1 - whom, since=whom) < _PROMISED


def test_the_others_of_three_name_the_same_worker(start: Callable[..., Job]) -> None:
    job = start("kill", 2, num_workers=3)
    codes = job.wait()
    assert codes[2] == -signal.SIGKILL
    assert codes[0] > 0 and codes[1] > 0
    for index in (0, 1):
        assert f"lost {job.name(2)}: it died" in job.output(index)
    assert any("WEIGHTS True" in job.output(index) for index in (0, 1))


def test_a_worker_that_stands_still_ends_the_others(start: Callable[..., Job]) -> None:
    job = start("stop", 1)
    assert job.workers[0].wait() == 1
    assert f"lost {job.name(1)}: it does not run: a signal such as SIGSTOP stopped it" in job.output(0)
    assert job.seconds(0, since=0) < _PROMISED + 5


@pytest.mark.kills("jax_destructors_without_a_limit")
def test_destructors_that_wait_for_a_lost_worker_end(start: Callable[..., Job]) -> None:
    job = start("kill before a long exit", 1)
    assert job.workers[0].wait() == signal.SIGALRM
    assert f"lost {job.name(1)}: it died" in job.output(0)


@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.in_turn(4)
def test_an_error_on_one_worker_ends_the_others_and_is_told(start: Callable[..., Job], whom: int) -> None:
    job = start("raise", whom)
    assert job.wait() == {0: 1, 1: 1}
    assert f"lost {job.name(whom)}: it failed: ValueError: disk full" in job.output(1 - whom)
    assert job.seconds(1 - whom, since=whom) < _PROMISED


@pytest.mark.kills(hint_for_a_worker_that_ended="[1]")
@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.in_turn(4)
def test_a_worker_that_exits_ends_the_others(start: Callable[..., Job], whom: int) -> None:
    job = start("exit", whom)
    assert job.wait() == {whom: 3, 1 - whom: 1}
    assert f"lost {job.name(whom)}: it ended before the others" in job.output(1 - whom)
    assert "If there is no error, call each method the same number of times" in job.output(1 - whom)


@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.in_turn(4)
def test_a_worker_may_end_earlier_than_the_other(start: Callable[..., Job], whom: int) -> None:
    job = start("late", whom)
    assert job.wait() == {0: 0, 1: 0}
    for output in map(job.output, job.workers):
        assert "DONE" in output
        for word in ("Gloo", "recoverable", "Terminating", "Traceback"):
            assert word not in output


def test_joining_twice(start: Callable[..., Job]) -> None:
    job = start("twice", 0)
    assert job.wait() == {0: 0, 1: 0}
    assert all(
        "REFUSED This process has already joined another cluster" in job.output(index) for index in (0, 1)
    )


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.in_turn(4)
def test_a_worker_that_never_comes_is_named(start: Callable[..., Job], missing: int) -> None:
    job = start("none", 0, skip=missing, timeout=6)
    assert job.wait(90) == {1 - missing: 1}
    output = job.output(1 - missing)
    expected = f"1 of 2 workers did not join within 6 s: {job.name(missing)}."
    assert f"WorkerTimeoutError: {expected}" in output
    assert "KDIST_JOIN_TIMEOUT" in output


def test_the_port_of_the_chief_is_in_use(start: Callable[..., Job]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = f"127.0.0.1:{held.getsockname()[1]}"
        job = start("none", 0, skip=1, addresses=[taken, "127.0.0.1:9"])
        assert job.wait(60) == {0: 1}
    assert "ClusterConfigError: Cannot listen on port" in job.output(0)


def test_too_late_to_join(start: Callable[..., Job]) -> None:
    job = start("too-late", 0, skip=1)
    assert job.wait(90) == {0: 1}
    assert "StrategyScopeError: Cannot join the workers: JAX has already started" in job.output(0)


FAR = """
import os, signal, time
import kdist.control.connections as connections
begin = connections.Connection.__init__
def begin_far(self, *arguments):
    begin(self, *arguments)
    self.is_near = False  # as if the other side were on another machine
connections.Connection.__init__ = begin_far
import kdist
strategy = kdist.MultiWorkerMirroredStrategy()
if strategy.runtime.worker_index == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
kdist.barrier()
"""


@pytest.mark.kills("jax_aborts_before_the_channel")
@pytest.mark.in_turn(4)
def test_a_chief_that_is_stopped_on_another_machine_is_named(tmp_path: Path) -> None:
    environments = [env | {"KDIST_HEARTBEAT_TIMEOUT": "3"} for env in environments_of("jax")]
    with started(tmp_path, FAR, environments) as (chief, other):
        assert other.wait(60) == 1
        assert "The job lost worker 0" in other.stderr() and "it does not run" in other.stderr()
        chief.kill()
