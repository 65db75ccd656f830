"""Keras's callbacks under a strategy write the same files as in plain Keras, only once, and no worker hangs."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.data import make_data
from tests.helpers.models import state_of, weights_of
from tests.helpers.processes import each_backend, full_unless, rank, run, run_plain, scope, strategy
from tests.saving_multi_process_test import Written, make_model

# Functions named in_worker_… run in the workers of a pool, and return values that the tests compare.


def in_worker_callbacks(folder, scoped, with_tensorboard):
    """Fits twice with all of Keras's callbacks that write; returns the results and the files of each worker."""
    import contextlib
    import io

    import keras

    model = make_model(scope=scope(scoped))
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
        told = {"batch_size": 6, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        first = model.fit(x, y, epochs=2, validation_data=(x, -y), **told)
        complete = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))
        second = model.fit(x, y, epochs=4, initial_epoch=2, validation_data=(x, y), **told)
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


@pytest.mark.kills(files_of_callbacks_written_by_all="[torch]")
@each_backend
def test_callbacks_write_what_they_write_in_plain_keras(backend, tmp_path):
    with_tensorboard = backend == "tensorflow"  # Keras's TensorBoard callback needs TensorFlow
    folders = [tmp_path / name for name in ("plain", "scoped")]
    for folder in folders:
        folder.mkdir()
    plain = run_plain(backend, in_worker_callbacks, str(folders[0]), False, with_tensorboard)
    results = run(backend, 2, in_worker_callbacks, str(folders[1]), True, with_tensorboard)
    files = [
        sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*") if "events" not in p.name)
        for folder in folders
    ]
    assert files[0] == files[1]
    assert {"best/model.keras", "epochs/04.keras", "log.csv"} <= set(files[1])
    assert sum(name.startswith("steps/") for name in files[1]) == 5  # sixteen steps
    for index, actual in enumerate(results):
        assert len(plain["log"]) == 4
        for name in ("history", "state", "seen", "best", "log"):
            assert_close(actual[name], plain[name])
        assert actual["files"] == results[0]["files"]
        assert (actual["written"] == []) == (index > 0)
        assert actual["printed"] == (index == 0)
    if with_tensorboard:
        counts = [len(list(folder.rglob("events*"))) for folder in folders]
        assert counts[0] == counts[1] > 0


def in_worker_backup(folder, scoped, save_freq, own_folders=False):
    """Fits three times: the first fit is interrupted, the second resumes, and the third has no epochs left."""

    import keras

    x, y = make_data()
    histories, files = [], []
    for attempt in range(3):
        keras.backend.clear_session()
        model = make_model(scope=scope(scoped))

        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, attempt=attempt, state={"step": 0}):  # noqa: B006
                state["step"] += 1
                if attempt == 0 and state["step"] == 11:  # the third step of the third epoch
                    raise InterruptedError

        backup = keras.callbacks.BackupAndRestore(
            folder, save_freq=save_freq, delete_checkpoint=attempt == 2, double_checkpoint=True
        )
        try:
            told = {"shuffle": False, "verbose": 0, "callbacks": [backup, Interrupt()]}
            fitted = model.fit(x, y, batch_size=6, epochs=5, **told)
            histories.append(fitted.history.get("loss", []))
        except InterruptedError:
            histories.append(None)
        files.append(sorted(path.name for path in Path(folder).glob("*")))
    return histories, state_of(model), files[1:]


@each_backend
@pytest.mark.parametrize(
    ("num_workers", "save_freq"),
    [
        pytest.param(workers, freq, marks=full_unless((workers == 2) == (freq == 3)))
        for workers in (1, 2)
        for freq in ("epoch", 3)
    ],
)
def test_backup_and_restore_goes_on_as_in_plain_keras(backend, num_workers, save_freq, tmp_path):
    folders = [str(tmp_path / name) for name in ("plain", "scoped")]
    plain = run_plain(backend, in_worker_backup, folders[0], False, save_freq)
    assert plain[0][0] is None and len(plain[0][1]) == 3 and plain[2][1] == []
    for histories, state, files in run(backend, num_workers, in_worker_backup, folders[1], True, save_freq):
        assert histories[0] is None
        assert histories[1] == pytest.approx(plain[0][1], rel=1e-5)
        assert histories[2] == pytest.approx(plain[0][2], rel=1e-5)
        assert_close(state, plain[1])
        assert files == plain[2]


def in_worker_one_sided(folder):
    """Fits with callbacks that only one worker has or that fail on one worker: no worker may hang."""

    import keras

    from kdist import errors

    model = make_model(scope=strategy().scope())
    x, y = make_data()

    def fit(*callbacks):
        epochs = np.int64(2)  # workers compare it as JSON, which cannot contain numbers of NumPy
        return model.fit(x, y, batch_size=6, epochs=epochs, verbose=0, callbacks=list(callbacks)).history

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
            if batch == 1:  # uses `model` from the closure; on JAX, its state is elsewhere during `fit`
                model.save_weights(f"{folder}/closure.weights.h5")
                shown = weights_of(self.model)
                other = make_model()
                other.load_weights(f"{folder}/closure.weights.h5")
                assert_equal(shown, state_of(other)[:4])

    fit(Mine(f"{folder}/mine.csv"))
    seconds = time.monotonic() - start

    def fail(epoch, logs):
        if rank() == 1:
            raise failure

    for failure in (errors.CheckpointError("a rule"), OSError("disk full")):
        with pytest.raises(type(failure) if rank() == 1 else errors.WorkerFailedError) as caught:
            fit(keras.callbacks.LambdaCallback(on_epoch_end=fail))

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(x, y, verbose=0)  # the chief waits here for worker 1, which has failed

    with pytest.raises(OSError if rank() == 1 else errors.WorkerFailedError, match="disk full"):
        fit(keras.callbacks.LambdaCallback(on_epoch_end=fail), Evaluates())
    if rank() == 0:
        model.load_weights(f"{folder}/0-1-3.keras")  # only on the chief
        loaded = state_of(model)
    model.evaluate(x, y, batch_size=6, verbose=0)
    assert rank() != 0 or all((a == b).all() for a, b in zip(loaded, state_of(model), strict=True))
    return state_of(model), str(caught.value), seconds


@pytest.mark.kills(
    "failure_before_another_method_hidden", "failed_worker_asked_again", "numpy_numbers_of_epochs_sent"
)
@each_backend
def test_callbacks_of_one_worker_and_errors_in_them_hang_nobody(backend, tmp_path):
    chief, other = run(backend, 2, in_worker_one_sided, str(tmp_path))
    assert_equal(chief[0], other[0])
    assert "Worker 1 failed in a callback: OSError: disk full" in chief[1]
    assert max(chief[2], other[2]) < 25
    names = {path.name for path in tmp_path.iterdir()}
    for who in (0, 1):
        assert {f"{who}-1-3.keras", f"{who}.csv", f"backup-{who}", f"own-{who}.csv"} <= names
    for name in ("1.csv", "mine.csv"):  # the header and two epochs
        assert len((tmp_path / name).read_text().splitlines()) == 3
