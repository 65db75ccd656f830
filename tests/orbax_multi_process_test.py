"""`keras.callbacks.OrbaxCheckpoint`: all workers write one checkpoint, with the same state as in plain Keras."""

from __future__ import annotations

import importlib.util
import os
import pickle

import numpy as np
import pytest

from kdist.testing import WorkerFailure
from tests.helpers.compare import assert_close
from tests.helpers.data import make_data
from tests.helpers.processes import each_backend, run, run_plain, scope
from tests.helpers.scripts import Script, environments_of, finished
from tests.saving_multi_process_test import make_model

needs_orbax = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None, reason="orbax-checkpoint is not installed"
)


def _rank():
    return int(os.environ.get("RANK", "0"))  # also without a strategy


def stand_in():
    """Replaces Orbax in Keras by a fake, which pickles the values that each process saves."""
    import sys
    from types import ModuleType, SimpleNamespace

    from keras.src.utils.module_utils import ocp

    class Checkpointer:
        def __init__(self, directory, **options):
            self.directory = directory
            os.makedirs(directory, exist_ok=True)

        def save_checkpointables(self, step, payload):
            with open(f"{self.directory}/{step}.{_rank()}", "wb") as file:
                pickle.dump(_leaves(payload["pytree"]), file)

        def close(self):
            pass

    def is_joined():
        import jax

        return jax.distributed.is_initialized()

    policies = SimpleNamespace(LatestN=lambda number: number, FixedIntervalPolicy=lambda steps: steps)
    package, module = ModuleType("orbax"), ModuleType("orbax.checkpoint")
    module.multihost = SimpleNamespace(
        is_jax_distributed_client_initialized=is_joined, sync_global_processes=lambda key: None
    )
    module.v1 = SimpleNamespace(
        Context=_Context,
        training=SimpleNamespace(
            Checkpointer=Checkpointer, preservation_policies=policies, save_decision_policies=policies
        ),
    )
    sys.modules |= {"orbax": package, "orbax.checkpoint": module}
    ocp.initialize()


class _Context:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def in_worker_fit(folder, scoped, own_folders=False):
    import keras

    stand_in()
    model = make_model(scope=scope(scoped))
    x, y = make_data()
    directory = f"{folder}/{_rank()}" if own_folders else folder
    saves = keras.callbacks.OrbaxCheckpoint(directory, save_on_background=False, save_freq=4)
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, callbacks=[saves])


def _leaves(tree, path=""):
    if isinstance(tree, dict):
        return {k: v for name, part in tree.items() for k, v in _leaves(part, f"{path}/{name}").items()}
    return {path: (type(tree).__name__, np.asarray(tree))}


def _states(folder):
    return {p.name: pickle.loads(p.read_bytes()) for p in sorted(folder.iterdir())}


@pytest.mark.kills(orbax_arrays_of_one_process="[jax]", orbax_written_by_all="[torch]")
@each_backend
def test_the_workers_write_one_checkpoint_of_the_state_of_plain_keras(backend, tmp_path):
    plain, scoped = tmp_path / "plain", tmp_path / "scoped"
    run_plain(backend, in_worker_fit, str(plain), False)
    run(backend, 2, in_worker_fit, str(scoped), True)
    expected, actual = _states(plain), _states(scoped)
    writers = (0, 1) if backend == "jax" else (0,)  # on JAX, Orbax itself writes only in the first process
    assert list(actual) == sorted(f"{name.split('.')[0]}.{w}" for name in expected for w in writers)
    for name, state in actual.items():
        wanted = expected[f"{name.split('.')[0]}.0"]
        assert state.keys() == wanted.keys()
        for path, (kind, value) in state.items():
            # With several processes, Orbax refuses JAX arrays that belong to one process.
            assert kind in ("ndarray", "int", "float"), path
            np.testing.assert_allclose(value, wanted[path][1], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.kills("orbax_directories_not_compared")
def test_on_jax_all_workers_must_save_to_the_same_directory(tmp_path):
    with pytest.raises(WorkerFailure, match=r"(?s)WorkerMismatchError: .*OrbaxCheckpoint"):
        run("jax", 2, in_worker_fit, str(tmp_path), True, True)


REAL = """
import json, os, sys
import keras, numpy as np
import kdist
strategy = kdist.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
draw = np.random.RandomState(0)
x, y = draw.rand(40, 4), draw.rand(40, 2)
saves = keras.callbacks.OrbaxCheckpoint(os.environ["FOLDER"], max_to_keep=2)
model.fit(x, y, epochs=3, batch_size=8, verbose=0, callbacks=[saves])
print(json.dumps([w.tolist() for w in model.get_weights()]))
"""
# Plain Keras builds the same model and loads the weights. This passed with Orbax 0.12.8.
LOAD = """
import json, os
import keras
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(2)])
model.compile("adam", "mse", metrics=["mae"])
model.load_weights(os.environ["FOLDER"])
print(json.dumps([w.tolist() for w in model.get_weights()]))
"""


@needs_orbax
@each_backend
def test_plain_keras_loads_what_orbax_wrote(backend, tmp_path):
    folder = tmp_path / "checkpoints"
    env = {"KERAS_BACKEND": backend, "FOLDER": str(folder)}
    workers = finished(tmp_path, REAL, environments_of(backend, FOLDER=str(folder)), 90)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    load = Script(tmp_path, "load", LOAD, env).finish(60)
    weights = load.told()
    for worker in workers:
        expected = worker.told()
        assert len(weights) == len(expected)
        assert_close(weights, expected, rtol=1e-6, atol=0)
