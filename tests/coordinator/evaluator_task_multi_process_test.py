"""A chief, a worker and an evaluator run one script as real processes; `TF_CONFIG` sets their roles."""

from __future__ import annotations

import numpy as np
import pytest

from tests.coordinator.clusters import run_roles
from tests.helpers.processes import each_backend_in_twelve_turns
from tests.helpers.scripts import Script

EPOCHS = 4

COMMON = """
import json, os, time
import keras
import numpy as np

random = np.random.RandomState(0)
centers = random.normal(size=(3, 6)).astype("float32")
labels = random.randint(3, size=240)
rows = centers[labels] + random.normal(size=(240, 6)).astype("float32")
train, test = (rows[:160], labels[:160]), (rows[160:], labels[160:])

def make_model(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.LayerNormalization(),
        keras.layers.Dense(3),
    ])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model

# What was learnt is lost in the last epoch.
spoils = keras.callbacks.LearningRateScheduler(lambda epoch: 3.0 if epoch == 3 else 0.01)
weights = keras.callbacks.ModelCheckpoint("plain/{epoch}.weights.h5", save_weights_only=True)
"""

JOB = (
    COMMON
    + """
from pathlib import Path
import kdist
from tests.helpers.scripts import wait_until

role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
strategy = kdist.MultiWorkerMirroredStrategy()
print("REPLICAS", strategy.num_replicas_in_sync, flush=True)
with strategy.scope():
    model = make_model(seed=5 if role == "evaluator" else 0)

class Save(keras.callbacks.Callback):
    '''Waits for the evaluator, so that it sees each of the checkpoints.'''
    def __init__(self):
        self.manager = kdist.CheckpointManager(kdist.Checkpoint(model=model), "checkpoints", None)
    def on_epoch_end(self, epoch, logs=None):
        path = self.manager.save()
        self.manager.wait()
        if epoch < 3:
            wait_until(Path(f"seen-{os.path.basename(path)}").exists)

class Note(keras.callbacks.Callback):
    def __init__(self):
        self.calls = []
    def on_test_begin(self, logs=None):
        self.calls.append("begin")
    def on_test_batch_end(self, batch, logs=None):
        self.calls.append("batch")
    def on_test_end(self, logs=None):
        self.calls.append("end")
        open(f"seen-ckpt-{self.calls.count('end')}", "w").close()

if role == "evaluator":
    note = Note()
    best = kdist.callbacks.SidecarEvaluatorModelExport("best.keras", monitor="val_loss")
    evaluator = kdist.SidecarEvaluator(
        model, test, "checkpoints", callbacks=[note, best], batch_size=16, poll_seconds=0.2, end_delay=1.0,
        first_timeout=120, timeout=60,
    )
    print("FOUND", json.dumps([[one.number, one.iterations, one.logs] for one in evaluator.start()]))
    print("CALLS", *note.calls)
else:
    model.fit(*train, batch_size=32, epochs=4, shuffle=False, verbose=0, callbacks=[spoils, weights, Save()])
"""
)

PLAIN = (
    COMMON
    + """
model = make_model(seed=1)
found = []
for epoch in range(1, 5):
    model.load_weights(f"plain/{epoch}.weights.h5")
    found.append(model.evaluate(*test, batch_size=16, verbose=0, return_dict=True))
best = keras.models.load_model("best.keras").evaluate(*test, batch_size=16, verbose=0, return_dict=True)
one = make_model(seed=0)
one.fit(*train, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=[spoils])
print(json.dumps([found, best, one.evaluate(*test, batch_size=16, verbose=0, return_dict=True)]))
"""
)


def printed(script, word):
    return next(line.partition(" ")[2] for line in script.stdout().splitlines() if line.startswith(word))


@pytest.mark.kills(evaluator_exports_the_last_model="[torch]")
@each_backend_in_twelve_turns
def test_an_evaluator_watches_a_chief_and_a_worker(backend, tmp_path):
    scripts = run_roles(tmp_path, JOB, backend)
    plain = Script(tmp_path, "plain", PLAIN, {"KERAS_BACKEND": backend}).finish()
    evaluator = scripts["evaluator"]
    # The chief trains as worker 0. The evaluator is its own only replica.
    assert [printed(script, "REPLICAS") for script in scripts.values()] == ["2", "2", "1"]
    found = evaluator.told("FOUND ")
    by_plain, best, trained_by_one = plain.told()
    assert [[number, steps] for number, steps, _ in found] == [[n, 5 * n] for n in range(1, EPOCHS + 1)]
    for (_, _, logs), expected in zip(found, by_plain, strict=True):
        assert logs == pytest.approx(expected, rel=1e-5)
    assert found[2][2] == pytest.approx(trained_by_one, rel=1e-5)
    losses = [logs["loss"] for _, _, logs in found]
    assert losses[-1] > min(losses) and len(set(losses)) == EPOCHS
    assert best["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert printed(evaluator, "CALLS").split() == ["begin", *["batch"] * 5, "end"] * EPOCHS
    assert evaluator.ended_at - scripts["chief"].ended_at < 15
    assert np.isfinite(losses).all()
