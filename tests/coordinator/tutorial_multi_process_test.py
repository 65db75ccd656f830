"""TensorFlow's tutorial on parameter servers (`tutorial.py`), in one process and as the tasks of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import each_backend_in_twelve_turns, run_plain
from tests.helpers.scripts import RUN, Script

TUTORIAL = Path(__file__).with_name("tutorial.py").read_text(encoding="utf-8")


def plain_losses() -> list[float]:
    """Returns the losses of the tutorial's `fit` with plain Keras on one device."""
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
    """Checks the tutorial's output: training learns, steps and rows count once, and all evaluations agree."""
    (line,) = [line for line in stdout.splitlines() if "found {" in line]
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    assert found["losses"] == pytest.approx(losses, rel=0.05)  # the steps use slightly stale variables
    assert found["steps"] == 5 * 20
    assert found["files"] == ["ckpt.keras", "log"]  # a successful `fit` deletes its backup
    assert found["accuracies"][-1] > 0.9  # the steps use stale variables
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


@pytest.mark.full  # notebook 9 also trains as tasks
@each_backend_in_twelve_turns
def test_as_tasks_of_a_job(backend: str, tmp_path: Path) -> None:
    command = [*RUN, "--num-workers", "2", "--num-ps", "2"]
    script = Script(tmp_path, "tutorial", TUTORIAL, {"KERAS_BACKEND": backend}, command).finish()
    check(script.stdout(), run_plain(backend, plain_losses))
