"""Training on TensorFlow's own workers and servers: results, exactly-once closures, and lost tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract import CASES, CONFIGURATIONS, compare, run_case
from tests.coordinator.clusters import Cluster, cluster
from tests.helpers.processes import full_unless, run_plain
from tests.helpers.scripts import Script
from tests.turn import turn

# The common head of the coordinator's scripts.
HEAD = """
import json, sys, threading, time
import keras, kdist, numpy as np, tensorflow as tf
from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

def make_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Cluster]:
    with cluster("tensorflow", tmp_path) as tasks:
        yield tasks


def result_of(script: Script, timeout: float = 120) -> Any:
    """Returns the last line of the script's output, parsed as JSON."""
    return script.finish(timeout).told()


def _plain_fit() -> list[np.ndarray]:
    scope: dict[str, Any] = {}
    exec(HEAD.replace("kdist, ", ""), scope)
    model = scope["make_model"]()
    model.fit(scope["x"], scope["y"], batch_size=64, epochs=1, verbose=0)
    return model.get_weights()


@pytest.mark.kills("messages_in_the_format_of_tensorflow")
@pytest.mark.in_turn(4)
def test_fit_one_after_the_other_is_plain_keras_and_beside_each_other_learns(job, tmp_path):
    script = job.coordinate(
        HEAD
        + f"""

partitioner = kdist.experimental.partitioners.FixedShardsPartitioner(2)
strategy = kdist.ParameterServerStrategy(None, partitioner, max_staleness=0)
with strategy.scope():
    model = make_model()
    assert keras.Variable(np.zeros((0, 3), "float32")).numpy().shape == (0, 3)
model.fit(x, y, batch_size=64, epochs=1, verbose=0)
import logging
assert not logging.root.handlers
np.savez({str(tmp_path / "weights.npz")!r}, *model.get_weights())
strategy.coordination.closures._staleness._most = None
model.fit(x, y, batch_size=64, epochs=5, verbose=0)
print(json.dumps([int(model.optimizer.iterations), model.evaluate(x, y, verbose=0)[1]]))
"""
    )
    expected = run_plain("tensorflow", _plain_fit)
    steps, accuracy = result_of(script)
    assert steps == 6 * 29
    assert accuracy > 0.95
    with np.load(tmp_path / "weights.npz") as weights:
        for name, value in zip(weights.files, expected, strict=True):
            np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)


LOOP = """
strategy = kdist.ParameterServerStrategy()
with strategy.scope():
    model, count = make_model(), keras.Variable(0, dtype="int32", trainable=False)
coordinator = kdist.coordinator.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(
    lambda: tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).repeat().batch(64)
))

@tf.function
def step(iterator):
    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        count.assign_add(1)
        return loss
    return strategy.run(replica, args=next(iterator))
"""


@pytest.mark.in_turn(4)
def test_workers_die_and_come_back_and_each_closure_counts_once(job):
    script = job.coordinate(
        HEAD
        + LOOP
        + """
results = []
for number in range(600):
    results.append(coordinator.schedule(step, args=(iterator,)))
    if number % 20 == 0:
        print("step", number, flush=True)
        time.sleep(0.05)
coordinator.join()
assert len(coordinator.fetch(results)) == 600
print("joined", int(count), int(model.optimizer.iterations), flush=True)
while min(strategy.coordination.incarnations) < 1:
    time.sleep(0.1)
for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
accuracy = float(np.mean(model.predict(x, verbose=0).argmax(1) == y))
print(json.dumps([int(count), int(model.optimizer.iterations), accuracy]))
"""
    )
    for index, text in ((0, "step 100"), (1, "step 300")):
        script.wait_for(text)
        job.kill("worker", index)
        job.start_task("worker", index)
        job.tasks["worker", index].wait_for("ready")
    assert result_of(script)[:2] == [620, 620]
    assert result_of(script)[2] > 0.95


@pytest.mark.kills("scheduled_without_autograph", "scheduled_writes_in_branches_always_count")
@pytest.mark.in_turn(4)
def test_errors_of_closures_are_their_own_and_a_lost_server_is_named(job):
    script = job.coordinate(
        HEAD
        + LOOP
        + """
def fails(number):
    raise KeyError("own")
try:
    coordinator.schedule(fails, args=(1.0,))
    coordinator.join()
except KeyError as error:
    print("raised", error, flush=True)

@kdist.function
def branches(x):
    total = 0.0
    for _ in tf.range(2):
        total += 1.0
    if total > x:
        return total
    return tf.cast(count, tf.float32) + x

@kdist.function
def writes(x):
    if x > 0:
        count.assign(x)
    return count.value
try:
    coordinator.schedule(writes, args=(tf.constant(-7),))
    coordinator.join()
except kdist.errors.UnsupportedError as error:
    print("refused", int(count), error, flush=True)
results = [coordinator.schedule(branches, args=(tf.constant(number),)) for number in (1.0, 3.0)]
print("branches", *map(float, coordinator.fetch(results)), flush=True)
coordinator.fetch(coordinator.schedule(step, args=(iterator,)))
print("trains", flush=True)
try:
    while True:
        coordinator.schedule(step, args=(iterator,))
        time.sleep(0.005)
except kdist.errors.WorkerLostError as error:
    print(json.dumps([str(error), time.time()]), flush=True)
"""
    )
    script.wait_for("trains")
    killed = time.time()
    job.kill("ps", 1)
    message, noticed = result_of(script)
    assert "refused 0 A scheduled function changes a variable in a branch" in script.stdout()
    assert "raised 'own'" in script.stdout() and "branches 2.0 3.0" in script.stdout()
    assert f"ps 1 ({job.spec['ps'][1]})" in message
    assert "BackupAndRestore" in message
    assert noticed - killed < 20


def test_a_server_that_never_comes_is_named(job):
    job.kill("ps", 0)
    script = job.coordinate(HEAD + "kdist.ParameterServerStrategy(timeout=3)")
    assert script.wait(60) != 0
    assert "WorkerTimeoutError" in script.stderr()
    assert f"ps 0 ({job.spec['ps'][0]})" in script.stderr()


# Keras 3.16 on TensorFlow does not report losses of single outputs; see tests/contract_multi_process_test.py.
NOT_YET = ("losses_of_outputs", "attention")
ABLE = [
    name
    for name, case in CASES.items()
    if "tensorflow" in case.backends
    and not case.needs
    and name not in NOT_YET
    and CONFIGURATIONS["servers-in-turn"].can(name, "tensorflow")
]


def contract_in_turn() -> Iterator[Any]:
    """Yields groups of contract cases; one group runs per turn, and in the other mode in the next round.

    Here the variables are whole, whereas the contract tests shard them.
    """
    groups = [ABLE[first : first + 3] for first in range(0, len(ABLE), 3)]
    rounds, place = divmod(turn(), len(groups))
    for position, mode in enumerate(("synchronous=True", "max_staleness=0")):
        for number, names in enumerate(groups):
            marks = full_unless(number == place and position == rounds % 2)
            yield pytest.param(mode, names, id="-".join([mode, *names]), marks=marks)


@pytest.mark.kills(tensorflow_servers_without_weight_decay="[max_staleness=0-sgd-adam-adamw]")
@pytest.mark.parametrize(("mode", "names"), contract_in_turn())
def test_the_contract(job, tmp_path, mode, names):
    script = job.coordinate(
        HEAD
        + f"""
import pickle
from tests.contract import run_case
strategy = kdist.ParameterServerStrategy({mode})
numbers = {{name: run_case(name, strategy) for name in {names!r}}}
pickle.dump(numbers, open({str(tmp_path / "numbers")!r}, "wb"))
print("[]")
"""
    )
    expected = run_plain("tensorflow", _plain_cases, names)
    result_of(script)
    import pickle

    actual = pickle.loads((tmp_path / "numbers").read_bytes())
    for name in names:
        compare(CASES[name], expected[name], actual[name])


def _plain_cases(names: list[str]) -> dict[str, Any]:
    return {name: run_case(name) for name in names}
