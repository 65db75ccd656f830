"""Keras's files under a strategy: written once, complete on every worker on return, with plain Keras's contents."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.compare import assert_equal
from tests.helpers.data import make_data
from tests.helpers.environment import clean_environment
from tests.helpers.models import network, state_of
from tests.helpers.processes import BACKENDS, each_backend, full_unless, rank, run, start_pool, strategy
from tests.helpers.scripts import environments_of, started

# Functions named in_worker_… run in the workers of a pool, and return values that the tests compare.


make_model = functools.partial(network, 4, 1, optimizer="adam", rate=0.05, metrics=["mae"], seed=5)


class Written:
    """A context that records the names of the files that this worker writes for a model."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        from kdist.training import saving

        self._original = saving.write_whole

        def write_whole(path, *args):
            self.names.append(Path(path).name)
            return self._original(path, *args)

        saving.write_whole = write_whole
        return self

    def __exit__(self, *exc):
        from kdist.training import saving

        saving.write_whole = self._original


# model.save ---------------------------------------------------------------------------------------------------


def in_worker_save(folder):
    """Saves in every way; returns the state, the files that this worker wrote, and the state loaded from each file."""
    import keras

    model = make_model(scope=strategy().scope())
    model.fit(*make_data(), batch_size=6, verbose=0)
    loaded = {}

    def load(name):
        loaded[name] = state_of(keras.models.load_model(f"{folder}/{name}"))

    with Written() as written:
        if rank() == 0:
            time.sleep(0.3)  # the other workers save first
        model.save(f"{folder}/same.keras")
        load("same.keras")
        if rank() != 0:
            time.sleep(0.3)  # now the other workers save last
        model.save(f"{folder}/kept.keras", overwrite=False)  # must not ask about the chief's new file
        keras.saving.save_model(model, Path(folder) / "second.keras")
        load("second.keras")
        model.save(f"{folder}/second.keras")  # the same state again
        model.save(f"{folder}/folder", zipped=False)
        load("folder")
        model.save_weights(f"{folder}/all.weights.h5")
        model.save_weights(f"{folder}/shards.weights.json", max_shard_size=0.1)
        other = make_model(scope=strategy().scope())
        other.load_weights(f"{folder}/shards.weights.json")
        loaded["shards"] = state_of(other)[:4]
        own = f"own-{rank()}.keras"
        model.save(f"{folder}/{own}")
        load(own)
        if rank() == 0:
            for _ in range(3):
                model.save(f"{folder}/chief.keras")
        missing = 0
        try:
            model.save(f"{folder}/no/such.keras")
        except FileNotFoundError:
            missing += 1
        model.fit(*make_data(), batch_size=6, verbose=0)
        model.save(f"{folder}/chief.keras")  # the chief has saved different states there
        load("chief.keras")
    return state_of(model), written.names, loaded, missing


def check_saved(results, folder):
    after, names, loaded, _ = results[0]
    assert names.count("same.keras") == 1 and names.count("chief.keras") == 4
    for index, (state, written, others, missing) in enumerate(results):
        assert_equal(state, after)
        assert missing == 1
        assert_equal(others["chief.keras"], after)
        assert_equal(others["shards"], loaded["same.keras"][:4])
        for name in ("same.keras", "second.keras", "folder"):
            assert_equal(others[name], loaded["same.keras"])
        assert_equal(others[f"own-{index}.keras"], loaded["same.keras"])
        if index > 0:  # each worker tries to write such.keras, and raises the error
            assert written == [f"own-{index}.keras", "such.keras"]
    assert not [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


@pytest.mark.kills(save_not_waited_for="torch")
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_chief_writes_and_all_have_the_file_on_return(backend, num_workers, tmp_path):
    with start_pool(num_workers, backend) as pool:  # new workers, because earlier saves of a worker matter
        check_saved(pool.run(in_worker_save, str(tmp_path)), tmp_path)


def in_worker_doubt(folder):
    """Saves when worker 1 cannot rely on the chief's file: it writes a file itself, and no worker waits long."""
    import logging

    from kdist.training import saving

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("kdist").addHandler(handler)
    model = make_model(scope=strategy().scope(), seed=6)
    model.fit(*make_data(), batch_size=6, verbose=0)
    saving._log._patience = 0.5
    start = time.monotonic()
    with Written() as written:
        if rank() == 1:
            model.save(f"{folder}/other.keras")  # the chief does not save this file
        model.train_on_batch(*make_data())
        seen = saving._stat
        if rank() == 1:
            saving._stat = lambda path: None  # as in a directory that the workers do not share
        model.save(f"{folder}/both.keras")
        saving._stat = seen
        model.train_on_batch(*make_data())
        if rank() == 0:
            model.save(f"{folder}/held.keras")
            before = Path(f"{folder}/held.keras").read_bytes()
            dense = model.layers[0]
            dense.save_own_variables = lambda store: 1 / 0  # fails in the middle of writing
            with pytest.raises(ZeroDivisionError):
                model.save(f"{folder}/held.keras")
            del dense.save_own_variables
            assert Path(f"{folder}/held.keras").read_bytes() == before
    logging.getLogger("kdist").removeHandler(handler)
    return written.names, records, time.monotonic() - start


@each_backend
def test_in_doubt_a_worker_writes_its_own_file(backend, tmp_path):
    chief, other = run(backend, 2, in_worker_doubt, str(tmp_path))
    assert chief[0] == ["both.keras", "held.keras", "held.keras"]
    assert other[0] == ["other.keras", "both.keras"]
    (said,) = other[1]
    assert "worker 1 writes" in said and "other.keras" in said and "chief (worker 0)" in said
    assert max(chief[2], other[2]) < 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.keras", "held.keras", "other.keras"]


# Plain Keras loads the files ----------------------------------------------------------------------------------


def in_worker_save_layers(folder, synchronized=False):
    import keras

    keras.utils.set_random_seed(5)
    with strategy().scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=synchronized),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    x, y = make_data()
    model.fit(x, y, batch_size=6, epochs=2, verbose=0)
    path = f"{folder}/worker-{rank()}.keras"
    model.save(path)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    with strategy().scope():
        loaded = keras.models.load_model(path)
    assert_equal(model.get_weights(), loaded.get_weights())
    loaded.fit(x, y, batch_size=6, verbose=0)
    return model.predict(x, verbose=0)


PLAIN_KERAS = """
import sys
import numpy as np
sys.modules["kdist"] = None  # any import of it is an error
import keras
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    assert "kdist" not in model.to_json()
    x = np.random.RandomState(0).randn(24, 3).astype("float32")
    np.save(path, predictions := model.predict(x, verbose=0))
    model.fit(x, x[:, :1], verbose=0)
    model.load_weights(path.replace(".keras", ".weights.h5"))
    assert np.allclose(model.predict(x, verbose=0), predictions)
"""


@pytest.mark.parametrize(
    ("synchronized", "backend"),
    # On TensorFlow, the synchronized layer is the harder case.
    [
        pytest.param(synchronized, backend, marks=full_unless(synchronized or backend != "tensorflow"))
        for backend in BACKENDS
        for synchronized in (False, True)
    ],
)
@pytest.mark.in_turn(4)
def test_saved_files_open_where_kdist_is_not_installed(backend, synchronized, tmp_path, request):
    if synchronized and backend != "tensorflow":
        reason = "Keras refuses to make a layer with synchronized=True on this backend, and the file says so"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    predictions = run(backend, 2, in_worker_save_layers, str(tmp_path), synchronized)
    np.testing.assert_array_equal(*predictions)
    env = clean_environment() | {"KERAS_BACKEND": backend}
    env.pop("PYTHONPATH")
    command = [sys.executable, "-c", PLAIN_KERAS, "worker-0.keras", "worker-1.keras"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        found = np.load(tmp_path / f"worker-{worker}.keras.npy")
        np.testing.assert_allclose(found, predictions[0], rtol=1e-5, atol=1e-6)


# The end of a script ------------------------------------------------------------------------------------------

LAST_LINE = """
import sys, time
import kdist
strategy = kdist.MultiWorkerMirroredStrategy()
import keras
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
if strategy.runtime.worker_index == 1:
    time.sleep(2)
model.save(sys.argv[1] if len(sys.argv) > 1 else "model.keras")
print("SAVED", flush=True)
"""


@pytest.mark.kills(posts_of_the_chief_end_with_it="[jax]")
@each_backend
def test_the_last_line_of_a_script_saves_once_where_another_worker_comes_later(backend, tmp_path):
    with started(tmp_path, LAST_LINE, environments_of(backend)) as scripts:
        for script in scripts:
            script.wait(120)
            assert "SAVED" in script.stdout(), script.stderr()
            assert "writes" not in script.stderr(), "the others find the post of a chief that has exited"
    assert (tmp_path / "model.keras").exists()
