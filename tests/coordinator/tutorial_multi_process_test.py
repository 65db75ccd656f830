"""TensorFlow's tutorial of parameter servers, which `tutorial.py` is: as one process, and as the tasks of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run_plain
from tests.helpers.scripts import RUN, Script

TUTORIAL = Path(__file__).with_name("tutorial.py").read_text(encoding="utf-8")


def plain_losses() -> list[float]:
    """In a plain process: the losses of the tutorial's `fit`, the same lines on one device."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    x, y = tf.random.uniform((10, 10)), tf.random.uniform((10, 1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat().batch(64)
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(), loss="mse")  # plain Keras on PyTorch has no `steps_per_execution`
    losses: list[float] = model.fit(dataset, epochs=5, steps_per_epoch=20, verbose=0).history["loss"]
    return losses


def check(stdout: str, losses: list[float]) -> None:
    """What the tutorial prints: training learns, each step and each row counts once, all evaluations agree."""
    (line,) = [line for line in stdout.splitlines() if "found {" in line]
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    assert found["losses"] == pytest.approx(losses, rel=0.05)  # of steps on variables that are a little old
    assert found["steps"] == 5 * 20
    assert found["files"] == ["ckpt.keras", "log"]  # a backup is deleted when `fit` has ended well
    assert found["accuracies"][-1] > 0.9  # of steps on variables that are more or less old
    assert found["rows"] == 5 * 32
    assert found["loss"] < 0.1
    assert found["loop steps"] == 4 * 5 + 1
    assert found["direct"] == found["scheduled"] == 1.0
    assert found["scheduled rows"] == 2 * 8


@pytest.mark.kills(
    servers_rows_of_metrics_lost="[jax]",
    servers_threads_keep_the_process="[torch]",
    servers_tutorial_updates_twice="[torch]",
)
@each_backend_in_twelve_turns
def test_in_one_process(backend: str, tmp_path: Path) -> None:
    script = Script(tmp_path, "tutorial", TUTORIAL, {"KERAS_BACKEND": backend}).finish()
    check(script.stdout(), run_plain(backend, plain_losses))


@pytest.mark.full  # notebook 9 trains as tasks, too
@each_backend_in_twelve_turns
def test_as_tasks_of_a_job(backend: str, tmp_path: Path) -> None:
    command = [*RUN, "--num-workers", "2", "--num-ps", "2"]
    script = Script(tmp_path, "tutorial", TUTORIAL, {"KERAS_BACKEND": backend}, command).finish()
    check(script.stdout(), run_plain(backend, plain_losses))
