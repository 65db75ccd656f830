"""Models outside a strategy, in workers with Keras 3.16, which enables DDP if a process group exists."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.scripts import environments_of, finished, local_addresses

# Two workers. The script adds the DDP code of Keras 3.16 to older versions; newer versions have it.
SOURCE = """
import json, os
import keras
import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 16):
    Trainer = next(c for c in keras.Model.__mro__ if c.__module__ == "keras.src.backend.torch.trainer")
    Trainer.ddp_model = None

    def _initialize_ddp(self):
        if dist.is_initialized() and self.ddp_model is None:
            object.__setattr__(self, "ddp_model", DistributedDataParallel(self))

    def get_metrics_result(self):
        if not dist.is_initialized():
            return super(Trainer, self).get_metrics_result()
        for v in self.metrics_variables:
            dist.all_reduce(v.value.data)
        return super(Trainer, self).get_metrics_result()

    def with_ddp(make):
        def made(self, *args, **kwargs):
            self._initialize_ddp()
            return make(self, *args, **kwargs)
        return made

    Trainer._initialize_ddp, Trainer.get_metrics_result = _initialize_ddp, get_metrics_result
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        setattr(Trainer, name, with_ddp(getattr(Trainer, name)))

import kdist

task = json.loads(os.environ["TF_CONFIG"])
index = task["task"]["index"]
if os.environ.get("OWN_GROUP"):
    dist.init_process_group("gloo", os.environ["OWN_GROUP"], rank=index, world_size=2)
strategy = kdist.MultiWorkerMirroredStrategy()
outside = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, use_bias=False)])
outside.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
with strategy.scope():
    inside = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, use_bias=False)])
    inside.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
x, y = np.arange(24.0).reshape(8, 3), np.arange(16.0).reshape(8, 2)
found = {}


def use(name, model):
    found[name] = {
        "kernel": model.get_weights()[0].tolist(),
        "predicted": model.predict(x, verbose=0).tolist(),
        "history": model.fit(x, y, verbose=0).history,
        "score": model.evaluate(x, y, verbose=0, return_dict=True),
        "is_ddp": model.ddp_model is not None,
    }


use("inside", inside)
if index == 0 or os.environ.get("OWN_GROUP"):
    use("outside", outside)
print(json.dumps(found))
"""


def _run(tmp_path, **env):
    return [script.told() for script in finished(tmp_path, SOURCE, environments_of("torch", **env), 60)]


def _check(found):
    x, y = np.arange(24.0).reshape(8, 3), np.arange(16.0).reshape(8, 2)
    predicted = x @ np.array(found["kernel"])
    np.testing.assert_allclose(found["predicted"], predicted, rtol=1e-5, atol=1e-5)
    wanted = {"loss": ((predicted - y) ** 2).mean(), "mae": np.abs(predicted - y).mean()}
    for name, value in wanted.items():
        np.testing.assert_allclose(found["history"][name], [value], rtol=1e-5)
        np.testing.assert_allclose(found["score"][name], value, rtol=1e-5)


@pytest.mark.kills("torch_plain_models_become_ddp")
@pytest.mark.timeout(150)
def test_the_chief_alone_can_use_a_model_outside_the_strategy(tmp_path):
    found = _run(tmp_path)
    for one in (found[0]["inside"], found[1]["inside"], found[0]["outside"]):
        _check(one)
        assert not one["is_ddp"]


@pytest.mark.full
@pytest.mark.timeout(150)
def test_models_use_the_process_group_that_the_user_made(tmp_path):
    for found in _run(tmp_path, OWN_GROUP=f"tcp://{local_addresses(1)[0]}"):
        _check(found["inside"])
        assert not found["inside"]["is_ddp"]
        assert found["outside"]["is_ddp"], "Keras's own data parallelism is gone"
