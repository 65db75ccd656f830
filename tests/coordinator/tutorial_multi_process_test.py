"""TensorFlow's tutorial of parameter servers, which `tutorial.py` is: as one process, and as the tasks of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Script, each_backend

TUTORIAL = Path(__file__).with_name("tutorial.py").read_text(encoding="utf-8")


def check(stdout: str) -> None:
    """What the tutorial prints: training learns, each step and each row counts once, all evaluations agree."""
    (line,) = [line for line in stdout.splitlines() if "found {" in line]
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    losses = found["losses"]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert found["steps"] == 5 * 20
    assert found["files"] == ["ckpt.keras", "log"]  # a backup is deleted when `fit` has ended well
    assert found["accuracies"][-1] > 0.9  # of steps on variables that are more or less old
    # Each worker's dataset has 200 rows in batches of 32, the last of them of 8.
    assert found["rows"] in range(5 * 8, 5 * 32 + 1, 8)
    assert found["loss"] < 0.1
    assert found["loop steps"] == 4 * 5 + 1
    assert found["direct"] == found["scheduled"] == 1.0
    assert found["scheduled rows"] == 2 * 8


@pytest.mark.kills(servers_threads_keep_the_process="[torch]")
@each_backend
def test_in_one_process(backend: str, tmp_path: Path) -> None:
    script = Script(tmp_path, "tutorial", TUTORIAL, {"KERAS_BACKEND": backend})
    try:
        assert script.wait() == 0, script.stderr()
    finally:
        script.kill()
    check(script.stdout())


@pytest.mark.full  # notebook 9 trains as tasks, too
@each_backend
def test_as_tasks_of_a_job(backend: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdist", "run", "--num-workers", "2", "--num-ps", "2"]
    script = Script(tmp_path, "tutorial", TUTORIAL, {"KERAS_BACKEND": backend}, command)
    try:
        assert script.wait() == 0, script.stderr()
    finally:
        script.kill()
    check(script.stdout())
