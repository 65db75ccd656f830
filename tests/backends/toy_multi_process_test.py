"""A toy backend on NumPy, without code of the other backends, trains like arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripts import Script, environments_of, started
from tests.pages.backend import toy_lines

MOST_LINES = 900
ROWS, BATCH, EPOCHS, RATE = 22, 7, 2, 0.02  # batches of 7, 7, 7 and 1 rows: uneven parts, and too few rows
SOURCE = """
import json, os
import numpy as np
import kdist, keras

devices = ["cpu:0", "cpu:1"]
strategy = kdist.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else kdist.MirroredStrategy(devices)
keras.utils.set_random_seed(os.getpid())  # workers draw different weights
with strategy.scope():
    drawn = keras.Variable(np.random.rand(3))
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE, momentum=0.5), "mse", metrics=["mae"])
told = {"drawn": drawn.numpy().tolist(), "initial": [w.tolist() for w in model.get_weights()]}
x, y = np.array(X, "float32"), np.array(Y, "float32")
told["history"] = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
told["weights"] = [w.tolist() for w in model.get_weights()]
told["evaluated"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
told["predicted"] = model.predict(x, batch_size=BATCH, verbose=0).tolist()

checkpoint = kdist.Checkpoint(model)
path = checkpoint.save("checkpoints")
model.set_weights([w * 0 for w in model.get_weights()])
checkpoint.restore(path).assert_consumed()
told["restored"] = [w.tolist() for w in model.get_weights()]

# A custom loop: one step of gradient descent on the sum of the errors of a batch.
with strategy.scope():
    slope = keras.Variable(np.zeros((3, 1), "float32"))
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    mean = keras.metrics.Mean()
    counter = keras.Variable(0, trainable=False, dtype="int32", aggregation="sum")

def step(batch):
    rows, labels = batch
    errors = lambda: keras.ops.sum(keras.ops.square(rows @ slope.value - labels))
    loss, gradients = kdist.value_and_grad(errors, [slope])()
    optimizer.apply(gradients, [slope])
    mean.update_state(labels)
    counter.assign_add(len(rows))
    replica = kdist.get_replica_context()
    total = replica.all_reduce("SUM", keras.ops.sum(labels))
    merged = replica.merge_call(lambda strategy, value: strategy.reduce("MEAN", value, axis=None), (loss,))
    return loss, labels, total, replica.all_gather(labels, axis=0), merged

batches = strategy.experimental_distribute_dataset([(x[:5], y[:5])])
for batch in batches:
    loss, labels, total, gathered, merged = strategy.run(step, args=(batch,))
first = lambda value: strategy.experimental_local_results(value)[0]
told["loop"] = {
    "loss": float(strategy.reduce("SUM", loss, axis=None)),
    "label": float(strategy.reduce("MEAN", labels, axis=0)[0]),
    "labels": strategy.gather(labels, axis=0)[:, 0].tolist(),
    "total": float(first(total)),
    "gathered": first(gathered)[:, 0].tolist(),
    "merged": float(first(merged)),
    "mean": float(mean.result()),
    "slope": slope.numpy()[:, 0].tolist(),
    "counter": int(counter),
    "iterations": int(optimizer.iterations),
}
print("TOLD " + json.dumps(told), flush=True)
"""
# The file by which an installed package adds its backend.
ENTRY_POINT = "[kdist.backends]\nnumpy = tests.backends.toy:ToyBackend\n"


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(5)
    x = random.randn(ROWS, 3)
    return x.round(3), (x @ [[1.5], [-2.0], [0.5]] + random.randn(ROWS, 1)).round(3)


def trained(kernel: np.ndarray, bias: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights and the loss of each epoch, by arithmetic on all rows of each batch."""
    x, y = data()
    velocities, losses = [0 * kernel, 0 * bias], []
    for _ in range(EPOCHS):
        total = 0.0
        for first in range(0, ROWS, BATCH):
            rows, labels = x[first : first + BATCH], y[first : first + BATCH]
            errors = rows @ kernel + bias - labels
            total += float(np.sum(errors**2))
            gradients = 2 * rows.T @ errors / len(rows), 2 * errors.mean(0)
            velocities = [0.5 * v - RATE * g for v, g in zip(velocities, gradients, strict=True)]
            kernel, bias = kernel + velocities[0], bias + velocities[1]
        losses.append(total / ROWS)
    return [kernel, bias], losses


def source() -> str:
    x, y = data()
    known = {"X": x.tolist(), "Y": y.tolist(), "RATE": RATE, "BATCH": BATCH, "EPOCHS": EPOCHS}
    return "\n".join(f"{name} = {value!r}" for name, value in known.items()) + SOURCE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a directory of scripts, with an installed package that adds the toy backend."""
    package = tmp_path / "kdist_toy-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kdist-toy\nVersion: 1\n", encoding="utf-8"
    )
    (package / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")
    return tmp_path


def check(told: Sequence[Any], num_replicas: int) -> None:
    x, y = data()
    for worker in told:
        weights, losses = trained(*(np.array(w) for w in told[0]["initial"]))
        close(worker["drawn"], told[0]["drawn"])
        close(worker["history"]["loss"], losses)
        for name in ("weights", "restored"):
            for found, expected in zip(worker[name], weights, strict=True):
                close(found, expected)
        outputs = x @ weights[0] + weights[1]
        close(worker["predicted"], outputs)
        close(worker["evaluated"], [np.mean((outputs - y) ** 2), np.mean(abs(outputs - y))])
        loop, labels = worker["loop"], y[:5, 0]
        close(loop["loss"], np.sum(labels**2))
        close(loop["merged"], np.sum(labels**2) / num_replicas)
        close([loop["label"], loop["mean"]], [labels.mean()] * 2)
        close([loop["labels"], loop["gathered"]], [labels] * 2)
        close(loop["total"], labels.sum())
        close(loop["slope"], RATE * 2 * x[:5].T @ labels)
        assert (loop["counter"], loop["iterations"]) == (5, 1)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.kills("added_backend_not_found", "merge_call_with_values_of_one_replica")
def test_two_replicas_in_one_process(folder: Path) -> None:
    script = Script(folder, "mirrored", source(), {"KERAS_BACKEND": "numpy"}).finish()
    check([script.told("TOLD ")], 2)


@pytest.mark.kills("predictions_of_other_workers_dropped")
def test_two_workers(folder: Path) -> None:
    with started(folder, source(), environments_of("numpy")) as scripts:
        check([script.finish().told("TOLD ") for script in scripts], 2)


ENDS = """
import os, sys
import numpy as np
import kdist, keras

strategy = kdist.MultiWorkerMirroredStrategy()
if os.environ["RANK_HERE"] == os.environ["VICTIM"]:
    os._exit(3) if os.environ["VICTIM"] == "0" else sys.exit(3)
try:
    kdist.barrier()
except kdist.errors.WorkerLostError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_ends_is_named(victim: int, folder: Path) -> None:
    with started(folder, ENDS, environments_of("numpy", VICTIM=str(victim))) as scripts:
        scripts[victim].finish(code=3)
        assert f"lost worker {victim} " in scripts[1 - victim].finish().stdout()


def test_a_backend_needs_few_lines() -> None:
    assert toy_lines()["The toy"] <= MOST_LINES
