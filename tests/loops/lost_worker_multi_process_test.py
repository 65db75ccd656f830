"""If a worker exits in the middle of a custom loop, the error of the other worker names it."""

from __future__ import annotations

import pytest

from tests.helpers.processes import each_backend
from tests.helpers.scripts import environments_of, local_addresses, started

# The limit is the same as for `fit`; a busy machine needs some more seconds to print a traceback.
LIMIT = 25.0

LOOP = """
import os

import kdist

strategy = kdist.MultiWorkerMirroredStrategy()

import keras

index = strategy.cluster_resolver.task_id
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)


def replica_step(x):
    loss_fn = lambda: keras.ops.mean(keras.ops.square(model(x)))
    loss, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)()
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@kdist.function
def train_step(x):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(x,)), axis=None)


for step in range(100):
    if step == 5 and index == 1:
        print("leaves")
        os._exit(9)
    train_step(keras.ops.ones((8, 4)))
"""


@pytest.fixture
def workers(backend, tmp_path):
    addresses = local_addresses(2)
    with started(tmp_path, LOOP, environments_of(backend, addresses)) as scripts:
        yield addresses, tmp_path, scripts


@each_backend
def test_the_other_worker_names_the_one_that_is_lost(backend, workers):
    addresses, folder, (first, second) = workers
    assert second.wait() == 9
    assert first.wait() not in (0, 9)
    left, told = ((folder / name).stat().st_mtime for name in ("worker1.out", "worker0.err"))
    assert told - left < LIMIT
    assert "WorkerLostError" in first.stderr()
    assert f"The job lost worker 1 ({addresses[1]})" in first.stderr()
