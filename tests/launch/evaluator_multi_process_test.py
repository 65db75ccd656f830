"""`kdist run --num-workers 2 --evaluator` with `kdist.estimator.train_and_evaluate`: three real processes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.helpers.processes import full_unless

_STEPS, _RATE = 6, 0.1
_SCRIPT = """
import json, os, pathlib, time
import keras
import numpy as np
import kdist

x, y, x_test, y_test = (np.load("data.npz")[name] for name in ("x", "y", "x_test", "y_test"))
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
calls = []

def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model

def train_input_fn(context):
    mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    while True:
        yield x[mine], y[mine]

def eval_input_fn():  # a generator, which can be read once
    calls.append(1)
    for start in range(0, len(x_test), 4):
        yield x_test[start : start + 4], y_test[start : start + 4]

class Wait(keras.callbacks.Callback):
    '''Trains on once the evaluator has seen the first checkpoint.'''
    def on_train_batch_begin(self, batch, logs=None):
        deadline = time.monotonic() + 90
        while batch == STEPS // 2 and not pathlib.Path("evaluated-1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

class Note(keras.callbacks.Callback):
    losses = []
    def on_test_end(self, logs=None):
        self.losses.append(float(logs["loss"]))
        pathlib.Path(f"evaluated-{len(self.losses)}").touch()

estimator = kdist.estimator
config = estimator.RunConfig(
    model_dir="checkpoints",
    save_checkpoints_steps=STEPS // 2,
    train_distribute=kdist.MultiWorkerMirroredStrategy(),
)
note = Note()
train = estimator.TrainSpec(train_input_fn, max_steps=STEPS, callbacks=[Wait()])
evaluate = estimator.EvalSpec(eval_input_fn, 100, start_delay_secs=0, throttle_secs=0, callbacks=[note])
logs = estimator.train_and_evaluate(make_model, train, evaluate, config)
if role == "evaluator":
    pathlib.Path("found.json").write_text(json.dumps([logs, note.losses, len(calls)]))
"""


@pytest.mark.in_turn(6)
@pytest.mark.kills(evaluator_reads_a_generator_once="[jax]")
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=full_unless(name == "jax")) for name in ("tensorflow", "jax", "torch")],
)
def test_the_evaluator_calls_input_fn_for_each_evaluation(backend, run, tmp_path):
    draw = np.random.default_rng()
    shapes = {"x": (8, 3), "y": (8, 1), "x_test": (10, 3), "y_test": (10, 1)}
    data = {name: draw.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    np.savez(tmp_path / "data.npz", **data)
    script = _SCRIPT.replace("STEPS", str(_STEPS)).replace("RATE", str(_RATE))
    job = run(script, "-n", "2", "--evaluator", prelude="", env={"KERAS_BACKEND": backend})
    assert job.wait(150) == 0, job.stdout() + job.stderr()
    logs, losses, calls = json.loads((tmp_path / "found.json").read_text())

    kernel, by_hand = np.zeros((3, 1)), []
    for step in range(1, _STEPS + 1):
        kernel -= _RATE * 2 / len(data["x"]) * data["x"].T @ (data["x"] @ kernel - data["y"])
        if step % (_STEPS // 2) == 0:
            by_hand.append(np.mean((data["x_test"] @ kernel - data["y_test"]) ** 2))
    assert losses == pytest.approx(by_hand, rel=1e-4)
    assert logs == {"loss": pytest.approx(by_hand[-1], rel=1e-4), "global_step": _STEPS}
    assert calls == len(losses) == 2
