"""`train_and_evaluate` with a chief, a worker and an evaluator: all options, and plain Keras's results."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.coordinator.clusters import run_roles
from tests.helpers.processes import each_backend_in_twelve_turns, run_plain
from tests.helpers.scripts import wait_until

STEPS, EVERY = 9, 3
START_DELAY, THROTTLE = 1.5, 3.0
SCRIPT = """
import kdist
from tests.coordinator.train_and_evaluate_multi_process_test import work

work()
"""


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(count).randn(count, 5).astype("float32")
    return x, x[:, :1] - x[:, 1:2] ** 2


def train_batches(first: int, number: int) -> list[Any]:
    """Returns some rows of each of three global batches of 8 rows, repeated for all steps."""
    x, y = rows(24)
    return [(x[i + first :][:number], y[i + first :][:number]) for i in (0, 8, 16)] * (STEPS // 3)


def make_model() -> Any:
    """Returns a model whose weights depend on the seed."""
    import keras

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def work() -> None:
    """Runs `train_and_evaluate` in a task of any role, and prints the findings."""
    import keras

    import kdist

    class Waits(keras.callbacks.Callback):
        """Waits for the evaluator at each checkpoint, because only two checkpoints are kept."""

        steps = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch and batch % EVERY == 0:
                wait_until(Path(f"seen-{batch // EVERY}").exists)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1

    class Notes(keras.callbacks.Callback):
        """Records the evaluator's calls, their times, and the logs."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []
            self.began: list[float] = []
            self.logs: list[dict[str, float]] = []

        def on_test_begin(self, logs: Any = None) -> None:
            self.calls.append("begin")
            self.began.append(time.monotonic())

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls.append("batch")

        def on_test_end(self, logs: Any = None) -> None:
            self.calls.append("end")
            self.logs.append({name: float(value) for name, value in logs.items()})
            Path(f"seen-{len(self.logs)}").touch()

    def train_rows(context: Any) -> Any:
        return train_batches(4 * context.input_pipeline_id, context.get_per_replica_batch_size(8))

    def test_rows() -> Any:
        x, y = rows(20)
        return ((x[i : i + 5], y[i : i + 5]) for i in range(0, 20, 5))

    waits, notes = Waits(), Notes()
    config = kdist.estimator.RunConfig(
        model_dir="checkpoints",
        tf_random_seed=7,
        save_checkpoints_steps=EVERY,
        keep_checkpoint_max=2,
        train_distribute=kdist.MultiWorkerMirroredStrategy(),
    )
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
        wait_until(Path(f"checkpoints/ckpt-{EVERY}").exists)  # the first evaluation could begin at once
    start = time.monotonic()
    result = kdist.estimator.train_and_evaluate(
        make_model,
        kdist.estimator.TrainSpec(train_rows, max_steps=STEPS, callbacks=[waits]),
        kdist.estimator.EvalSpec(
            test_rows, steps=2, start_delay_secs=START_DELAY, throttle_secs=THROTTLE, callbacks=[notes]
        ),
        config,
    )
    found = {"result": result, "steps": waits.steps, "calls": notes.calls, "logs": notes.logs}
    print("FOUND", json.dumps(found | {"began": [began - start for began in notes.began]}), flush=True)


def plain_logs() -> list[dict[str, float]]:
    """Returns the results of plain Keras on two test batches after every third step."""
    import keras

    keras.utils.set_random_seed(7)
    model, logs = make_model(), []
    x, y = rows(20)
    for step, batch in enumerate(train_batches(0, 8), start=1):
        model.train_on_batch(*batch)
        if step % EVERY == 0:
            logs.append(model.evaluate(x[:10], y[:10], batch_size=5, verbose=0, return_dict=True))
    return logs


@pytest.mark.kills(
    estimator_callbacks_of_training_lost="[jax]",
    estimator_counts_steps_without_training="[jax]",
    estimator_evaluates_once="[jax]",
    estimator_evaluations_not_throttled="[jax]",
    estimator_evaluator_does_not_wait="[jax]",
    estimator_keeps_all_checkpoints="[jax]",
    estimator_seed_not_set="[jax]",
    estimator_steps_of_an_evaluation_ignored="[jax]",
)
@each_backend_in_twelve_turns
def test_an_evaluator_evaluates_each_checkpoint_as_it_comes(backend: str, tmp_path: Path) -> None:
    found = {role: script.told("FOUND ") for role, script in run_roles(tmp_path, SCRIPT, backend).items()}
    for role in ("chief", "worker"):
        assert (found[role]["result"], found[role]["steps"], found[role]["calls"]) == (None, STEPS, [])
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*")) == ["ckpt-6", "ckpt-9"]
    evaluator, expected = found["evaluator"], run_plain(backend, plain_logs)
    assert evaluator["steps"] == 0
    assert evaluator["calls"] == ["begin", "batch", "batch", "end"] * 3
    for logs, plain in zip(evaluator["logs"], expected, strict=True):
        assert logs == pytest.approx(plain, rel=1e-5)
    assert evaluator["result"] == evaluator["logs"][-1] | {"global_step": STEPS}
    first, second, _ = evaluator["began"]  # training has ended, so the last evaluation does not wait
    assert first >= START_DELAY
    assert second - first > THROTTLE - 1.0  # from the check of the directory; loading takes a moment
