"""The contenders of `kdist bench --compare` train the same model as plain Keras, and collectives are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import each_backend, run
from tests.helpers.scripts import Script, environments_of, finished

# A regularizer counts once per step, and Adam does not forgive a wrong scale of the gradients in its first steps.
MODEL = """
import keras

def make_model():
    inputs = [keras.Input((3,)), keras.Input((2,))]
    hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(keras.layers.Concatenate()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
SCRIPT = """
import json
from kdist.measuring import bench_worker
print(json.dumps(bench_worker.measure_contender({kind!r}, "mine:make_model", 8, 3, 2)))
"""
# Test environments contain neither package. These substitutes have the functions that the loop calls.
SUBSTITUTES = {
    "accelerate": """
import torch

class Accelerator:
    def __init__(self, cpu):
        torch.distributed.init_process_group("gloo")

    def prepare_model(self, model):
        return torch.nn.parallel.DistributedDataParallel(model)

    def backward(self, loss):
        loss.backward()
""",
    "lightning_fabric": """
import os
import torch

class Fabric:
    def __init__(self, accelerator, devices, num_nodes, strategy):
        assert (accelerator, devices, num_nodes, strategy) == ("auto", 1, 2, "ddp")
        assert (os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]) == ("0", os.environ["RANK"])

    def launch(self):
        torch.distributed.init_process_group("gloo")

    def setup_module(self, model):
        return torch.nn.parallel.DistributedDataParallel(model)

    def backward(self, loss):
        loss.backward()
""",
}
TORCH = ("ddp", "accelerate", "fabric")


@pytest.mark.in_turn(4)
@pytest.mark.kills(
    bench_first_epoch_of_keras_counts="jax",
    contenders_without_exchange="ddp",
    contenders_same_rows=("ddp", "jax"),
    contenders_jax_optimizer_forgets="jax",
)
@pytest.mark.parametrize("kind", [*TORCH, "jax"])
def test_a_contender_trains_as_plain_keras_does(kind: str, tmp_path: Path) -> None:
    backend = "torch" if kind in TORCH else "jax"
    (tmp_path / "mine.py").write_text(MODEL)
    for name, source in SUBSTITUTES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (environment,) = environments_of(backend, 1)
    expected = Script(tmp_path, "keras", SCRIPT.format(kind="keras"), environment).finish().told()
    places = environments_of(backend, 2)
    port = json.loads(places[0]["TF_CONFIG"])["cluster"]["worker"][0].split(":")[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [place | shared | {"RANK": place["RANK_HERE"]} for place in places]
    for worker in finished(tmp_path, SCRIPT.format(kind=kind), places):
        result = worker.told()
        assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def in_worker_all_reduce() -> dict[str, Any]:
    from kdist.measuring import collectives

    return collectives.measure(2, (1024, 8192))


@each_backend
def test_collectives_are_measured_beside_the_frameworks_own(backend: str) -> None:
    result = run(backend, 2, in_worker_all_reduce)[0]
    assert (result["backend"], result["num_workers"]) == (backend, 2)
    assert [one["bytes"] for one in result["sizes"]] == [1024, 8192]
    for one in result["sizes"]:
        assert len(one["kdist"]) == len(one["raw"]) == 2 and min(*one["kdist"], *one["raw"]) > 0
