"""Keras's own files under a strategy: written once, complete on return on every worker, plain Keras's contents."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import Script, each_backend, local_addresses, run, start_pool, strategy, tf_config

# Everything named in_worker_… runs in the workers of a pool, and returns what the tests compare.


def rank():
    return strategy().runtime.worker_index


def make_data(rows=24):
    x = np.random.RandomState(0).randn(rows, 3).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2]).astype("float32")


def make_model(scope, seed=5):
    import keras

    keras.utils.set_random_seed(seed)
    with scope:
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def state_of(model):
    import keras

    return [keras.ops.convert_to_numpy(v) for v in [*model.weights, *model.optimizer.variables]]


def assert_same(one, two, **tolerance):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(b, a, **(tolerance or {"rtol": 1e-5, "atol": 2e-6}))


class Written:
    """Within this, the names of the files that this worker writes for a model are noted."""

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
    """Saves in every way; returns the state, who wrote what, and the state that each file gives at once."""
    import keras

    model = make_model(strategy().scope())
    model.fit(*make_data(), batch_size=6, verbose=0)
    loaded = {}

    def load(name):
        loaded[name] = state_of(keras.models.load_model(f"{folder}/{name}"))

    with Written() as written:
        if rank() == 0:
            time.sleep(0.3)  # the others come first
        model.save(f"{folder}/same.keras")
        load("same.keras")
        if rank() != 0:
            time.sleep(0.3)  # and now last
        model.save(f"{folder}/kept.keras", overwrite=False)  # no question about the chief's new file
        keras.saving.save_model(model, Path(folder) / "second.keras")
        load("second.keras")
        model.save(f"{folder}/second.keras")  # the same state again
        model.save(f"{folder}/folder", zipped=False)
        load("folder")
        model.save_weights(f"{folder}/all.weights.h5")
        model.save_weights(f"{folder}/shards.weights.json", max_shard_size=0.1)
        other = make_model(strategy().scope())
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
        model.save(f"{folder}/chief.keras")  # the chief has saved other states there
        load("chief.keras")
    return state_of(model), written.names, loaded, missing


def check_saved(results, folder):
    after, names, loaded, _ = results[0]
    assert names.count("same.keras") == 1 and names.count("chief.keras") == 4
    for index, (state, written, others, missing) in enumerate(results):
        assert_same(state, after, rtol=0)
        assert missing == 1
        assert_same(others["chief.keras"], after, rtol=0)
        assert_same(others["shards"], loaded["same.keras"][:4], rtol=0)
        for name in ("same.keras", "second.keras", "folder"):
            assert_same(others[name], loaded["same.keras"], rtol=0)
        assert_same(others[f"own-{index}.keras"], loaded["same.keras"], rtol=0)
        if index > 0:  # such.keras: the error is each worker's own
            assert written == [f"own-{index}.keras", "such.keras"]
    assert not [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


@each_backend
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_chief_writes_and_all_have_the_file_on_return(backend, num_workers, tmp_path):
    with start_pool(num_workers, backend) as pool:  # what kept workers have saved before counts
        check_saved(pool.run(in_worker_save, str(tmp_path)), tmp_path)


def in_worker_doubt(folder):
    """Where the chief's file cannot be relied on, a worker writes its own, and nobody waits long."""
    import logging

    from kdist.training import saving

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("kdist").addHandler(handler)
    model = make_model(strategy().scope(), seed=6)
    model.fit(*make_data(), batch_size=6, verbose=0)
    saving._log._patience = 0.5
    start = time.monotonic()
    with Written() as written:
        if rank() == 1:
            model.save(f"{folder}/other.keras")  # which the chief does not
        model.train_on_batch(*make_data())
        seen = saving._stat
        if rank() == 1:
            saving._stat = lambda path: None  # as in a folder that is not shared
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


# Callbacks ----------------------------------------------------------------------------------------------------


def in_worker_callbacks(folder, scoped, with_tensorboard):
    """Two fits with all of Keras's callbacks that write; returns the history and the files each worker wrote."""
    import contextlib
    import io

    import keras

    model = make_model(strategy().scope() if scoped else contextlib.nullcontext())
    x, y = make_data()
    best = keras.callbacks.ModelCheckpoint(
        f"{folder}/best/model.keras", monitor="val_loss", save_best_only=True, verbose=1
    )
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(state_of(keras.models.load_model(f"{folder}/epochs/{epoch + 1:02d}.keras"))[0])

    callbacks = [
        best,
        keras.callbacks.ModelCheckpoint(f"{folder}/epochs/{{epoch:02d}}.keras"),
        keras.callbacks.ModelCheckpoint(
            f"{folder}/steps/{{epoch}}-{{batch}}.weights.h5", save_weights_only=True, save_freq=3
        ),
        keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        Look(),
    ]
    if with_tensorboard:
        callbacks.append(keras.callbacks.TensorBoard(f"{folder}/board", write_graph=True))
    printed = io.StringIO()
    with Written() as written, contextlib.redirect_stdout(printed):
        first = model.fit(
            x,
            y,
            batch_size=6,
            epochs=2,
            validation_data=(x, -y),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        complete = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))
        second = model.fit(
            x,
            y,
            batch_size=6,
            epochs=4,
            initial_epoch=2,
            validation_data=(x, y),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    log = list(csv.DictReader(Path(f"{folder}/log.csv").read_text().splitlines()))
    return {
        "history": {f"{k} {i}": v for i, h in enumerate((first, second)) for k, v in h.history.items()},
        "state": state_of(model),
        "seen": seen,
        "best": float(best.best),
        "log": [{name: float(value) for name, value in row.items()} for row in log],
        "files": complete,
        "written": sorted(written.names),
        "printed": "saving model to" in printed.getvalue(),
    }


@each_backend
def test_callbacks_write_what_they_write_in_plain_keras(backend, tmp_path):
    with_tensorboard = backend == "tensorflow"  # needs its package
    folders = [tmp_path / name for name in ("plain", "scoped")]
    for folder in folders:
        folder.mkdir()
    plain = run(backend, 1, in_worker_callbacks, str(folders[0]), False, with_tensorboard)[0]
    results = run(backend, 2, in_worker_callbacks, str(folders[1]), True, with_tensorboard)
    files = [
        sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*") if "events" not in p.name)
        for folder in folders
    ]
    assert files[0] == files[1]
    assert {"best/model.keras", "epochs/04.keras", "log.csv"} <= set(files[1])
    assert sum(name.startswith("steps/") for name in files[1]) == 5  # sixteen steps
    for index, actual in enumerate(results):
        assert actual["history"].keys() == plain["history"].keys()
        for name, values in plain["history"].items():
            assert actual["history"][name] == pytest.approx(values, rel=1e-5)
        assert_same(plain["state"], actual["state"])
        assert_same(plain["seen"], actual["seen"])
        assert actual["best"] == pytest.approx(plain["best"], rel=1e-5)
        assert len(actual["log"]) == len(plain["log"]) == 4
        for mine, theirs in zip(plain["log"], actual["log"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5)
        assert actual["files"] == results[0]["files"]
        assert (actual["written"] == []) == (index > 0)
        assert actual["printed"] == (index == 0)
    if with_tensorboard:
        counts = [len(list(folder.rglob("events*"))) for folder in folders]
        assert counts[0] == counts[1] > 0


def in_worker_backup(folder, scoped, save_freq, own_folders=False):
    """A fit that is interrupted, one that goes on, and one with nothing left to do."""
    import contextlib

    import keras

    x, y = make_data()
    histories, files = [], []
    for attempt in range(3):
        keras.backend.clear_session()
        model = make_model(strategy().scope() if scoped else contextlib.nullcontext())

        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, attempt=attempt, state={"step": 0}):  # noqa: B006
                state["step"] += 1
                if attempt == 0 and state["step"] == 11:  # the third step of the third epoch
                    raise InterruptedError

        backup = keras.callbacks.BackupAndRestore(
            folder, save_freq=save_freq, delete_checkpoint=attempt == 2, double_checkpoint=True
        )
        try:
            fitted = model.fit(
                x,
                y,
                batch_size=6,
                epochs=5,
                shuffle=False,
                verbose=0,
                callbacks=[backup, Interrupt()],
            )
            histories.append(fitted.history.get("loss", []))
        except InterruptedError:
            histories.append(None)
        files.append(sorted(path.name for path in Path(folder).glob("*")))
    return histories, state_of(model), files[1:]


@each_backend
@pytest.mark.parametrize(
    ("num_workers", "save_freq"),
    [(1, "epoch"), (2, 3), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, 3), (2, "epoch")))],
)
def test_backup_and_restore_goes_on_as_in_plain_keras(backend, num_workers, save_freq, tmp_path):
    folders = [str(tmp_path / name) for name in ("plain", "scoped")]
    plain = run(backend, 1, in_worker_backup, folders[0], False, save_freq)[0]
    assert plain[0][0] is None and len(plain[0][1]) == 3 and plain[2][1] == []
    for histories, state, files in run(backend, num_workers, in_worker_backup, folders[1], True, save_freq):
        assert histories[0] is None
        assert histories[1] == pytest.approx(plain[0][1], rel=1e-5)
        assert histories[2] == pytest.approx(plain[0][2], rel=1e-5)
        assert_same(plain[1], state)
        assert files == plain[2]


def in_worker_one_sided(folder):
    """Callbacks that only one worker has, or that fail on one, hang nobody."""
    import contextlib

    import keras

    from kdist import errors

    model = make_model(strategy().scope())
    x, y = make_data()

    def fit(*callbacks):
        return model.fit(x, y, batch_size=6, epochs=2, verbose=0, callbacks=list(callbacks)).history

    start = time.monotonic()
    for who in (0, 1):
        checkpoint = keras.callbacks.ModelCheckpoint(
            f"{folder}/{who}-{{epoch}}-{{batch}}.keras", save_freq=3, monitor="loss"
        )
        log = keras.callbacks.CSVLogger(f"{folder}/{who}.csv")
        backup = keras.callbacks.BackupAndRestore(f"{folder}/backup-{who}", delete_checkpoint=False)
        fit(*([checkpoint, log, backup] if rank() == who else []))
    fit(keras.callbacks.CSVLogger(f"{folder}/own-{rank()}.csv"))

    class Mine(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(
                epoch, {"mean": self.model.predict(x, verbose=0).mean()}
            )  # needs all workers

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:  # by its own name, where JAX has the state elsewhere
                model.save_weights(f"{folder}/closure.weights.h5")
                shown = [keras.ops.convert_to_numpy(w) for w in self.model.weights]
                other = make_model(contextlib.nullcontext())
                other.load_weights(f"{folder}/closure.weights.h5")
                assert_same(shown, state_of(other)[:4], rtol=0)

    fit(Mine(f"{folder}/mine.csv"))
    seconds = time.monotonic() - start

    def fail(epoch, logs):
        if rank() == 1:
            raise failure

    for failure in (errors.CheckpointError("a rule"), OSError("disk full")):
        with pytest.raises(type(failure) if rank() == 1 else errors.WorkerFailedError) as caught:
            fit(keras.callbacks.LambdaCallback(on_epoch_end=fail))
    if rank() == 0:
        model.load_weights(f"{folder}/0-1-3.keras")  # on the chief alone
        loaded = state_of(model)
    model.evaluate(x, y, batch_size=6, verbose=0)
    assert rank() != 0 or all((a == b).all() for a, b in zip(loaded, state_of(model), strict=True))
    return state_of(model), str(caught.value), seconds


@each_backend
def test_callbacks_of_one_worker_and_errors_in_them_hang_nobody(backend, tmp_path):
    chief, other = run(backend, 2, in_worker_one_sided, str(tmp_path))
    assert_same(chief[0], other[0], rtol=0)
    assert "Worker 1 failed in a callback: OSError: disk full" in chief[1]
    assert max(chief[2], other[2]) < 25
    names = {path.name for path in tmp_path.iterdir()}
    for who in (0, 1):
        assert {f"{who}-1-3.keras", f"{who}.csv", f"backup-{who}", f"own-{who}.csv"} <= names
    for name in ("1.csv", "mine.csv"):  # the header and two epochs
        assert len((tmp_path / name).read_text().splitlines()) == 3


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


@each_backend
def test_the_last_line_of_a_script_saves_when_the_chief_has_gone(backend, tmp_path):
    addresses = local_addresses(2)
    scripts = []
    try:
        for index in range(2):
            env = {"KERAS_BACKEND": backend, "TF_CONFIG": tf_config(addresses, index)}
            scripts.append(Script(tmp_path, f"worker{index}", LAST_LINE, env))
        for script in scripts:
            script.wait(120)
            assert "SAVED" in script.stdout(), script.stderr()
    finally:
        for script in scripts:
            script.kill()
    assert (tmp_path / "model.keras").exists()
