"""Checkpoints of sharded variables on servers restore under any strategy, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.coordinator.clusters import cluster, facts
from tests.helpers.processes import BACKENDS, each_backend_in_twelve_turns, full_unless
from tests.helpers.scripts import Script

SCRIPT = """
import faulthandler
faulthandler.dump_traceback_later(150, exit=True)
import json
import numpy as np
import keras, kdist
from kdist.testing import free_ports

places = [f"localhost:{port}" for port in free_ports(3)]
cluster = {"worker": places[:1], "ps": places[1:]}
for job, index in [("worker", 0), ("ps", 0), ("ps", 1)]:
    kdist.Server(cluster, job, index)
resolver = kdist.cluster_resolver.SimpleClusterResolver(kdist.cluster_resolver.ClusterSpec(cluster))
x = np.random.default_rng(0).random((64, 5)).astype("float32")
y = x[:, :1] - x[:, 1:2]


def model_under(strategy, seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v.value)).tolist() for v in variables]


found = {}
devices = ["cpu:0"]
strategies = {
    "servers": kdist.ParameterServerStrategy(
        resolver, kdist.experimental.partitioners.FixedShardsPartitioner(2), max_staleness=0
    ),
    "one": kdist.OneDeviceStrategy("cpu:0"),
    "mirrored": kdist.MirroredStrategy(devices),
}
ways = [("servers", "one"), ("servers", "mirrored"), ("one", "servers"), ("servers", "servers")]
for number, (source, target) in enumerate(ways):
    saved = model_under(strategies[source], 1)
    saved.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    path = kdist.Checkpoint(model=saved).save(f"checkpoint{number}/c")
    before = state(saved)
    restored = model_under(strategies[target], 2)
    restored.fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)  # so that both have all variables
    kdist.Checkpoint(model=restored).restore(path)
    after = state(restored)
    for model in (saved, restored):
        model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    found[f"{source} → {target}"] = before, after, state(saved), state(restored)
print("found", json.dumps(found), flush=True)
"""


@each_backend_in_twelve_turns
def test_a_checkpoint_of_servers_is_one_of_any_strategy(backend: str, tmp_path: Path) -> None:
    script = Script(tmp_path, "checkpoints", SCRIPT, {"KERAS_BACKEND": backend}).finish()
    found: dict[str, Any] = script.told("found ")
    assert len(found) == 4
    for way, (before, after, saved, restored) in found.items():
        for mine, theirs in zip(before, after, strict=True):
            np.testing.assert_array_equal(np.array(theirs), np.array(mine), err_msg=way)
        for mine, theirs in zip(saved, restored, strict=True):  # training continues with the same results
            np.testing.assert_allclose(np.array(theirs), np.array(mine), rtol=1e-5, atol=1e-6, err_msg=way)


@pytest.mark.parametrize("backend", [pytest.param(b, marks=full_unless(b == "torch")) for b in BACKENDS])
def test_a_job_that_has_lost_a_server_goes_on_from_its_backup(backend: str, tmp_path: Path) -> None:
    source = """
    x = np.random.default_rng(0).random((64, 5)).astype("float32")
    strategy = kdist.ParameterServerStrategy(
        variable_partitioner=kdist.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")

    class Tell(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            tell(epoch=epoch, iterations=int(model.optimizer.iterations))
            if epoch == 2 and not os.path.exists("second"):
                open("second", "w").close()
                while not os.path.isdir("backup/ckpt-2"):  # written in the background
                    time.sleep(0.01)
                print("kill", flush=True)
                time.sleep(60)

    model.fit(
        x, x[:, :1], batch_size=16, epochs=4, verbose=0,
        callbacks=[kdist.callbacks.BackupAndRestore("backup"), Tell()],
    )
    """
    with cluster(backend, tmp_path, 1, 2) as tasks:
        first = tasks.coordinate(source)
        first.wait_for("kill")
        tasks.kill("ps", 1)
        first.kill()
        tasks.start_task("ps", 1)
        second = tasks.coordinate(source).finish()
        assert [fact["epoch"] for fact in facts(first)] == [0, 1, 2]
        assert facts(second) == [{"epoch": 2, "iterations": 8}, {"epoch": 3, "iterations": 12}]


@pytest.mark.kills("coordinator_backup_without_its_last_steps")
@each_backend_in_twelve_turns
def test_a_backup_in_the_middle_of_an_epoch_contains_all_steps_before_its_position(
    backend: str, tmp_path: Path
) -> None:
    source = """
    from kdist.checkpoint.checked_reading import read_index, read_tensors

    x = np.random.default_rng(0).random((96, 5)).astype("float32")
    strategy = kdist.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    backup = kdist.callbacks.BackupAndRestore("backup", save_freq=5, delete_checkpoint=False, max_to_keep=9)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[backup])
    for number in range(1, 5):
        index = read_index(f"backup/ckpt-{number}")
        counter = next(tensor for tensor in index.tensors if tensor.name == "model.optimizer/0/iteration")
        applied = int(read_tensors(f"backup/ckpt-{number}", index, [counter])[counter.name])
        position = index.states["fit"][0]
        tell(applied=applied, counted=12 * position["epoch"] + position["step"])
    """
    with cluster(backend, tmp_path, 2, 1) as tasks:
        done = tasks.coordinate(source).finish()
        assert facts(done) == [{"applied": steps, "counted": steps} for steps in (5, 10, 15, 20)]
