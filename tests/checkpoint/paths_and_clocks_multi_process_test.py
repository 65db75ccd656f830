"""Checkpoints, backups and logs in symlinked and non-ASCII directories, and with wrong clocks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.compare import assert_equal
from tests.helpers.processes import each_backend, run, strategy

NAME = "Läufe 訓練 – e\N{COMBINING ACUTE ACCENT}"
EPOCHS, STOP = 4, 5  # 3 steps per epoch


class Interrupted(Exception):
    """Ends a job."""


def fit(folder: str, ends_after: int | None, is_true: bool, *callbacks: Any) -> tuple[list[float], list[int]]:
    """Trains with a backup after each step; returns the weights, and the steps, counted from 0."""
    import keras

    import kdist

    taken: list[int] = []

    class Steps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            taken.append(self.epoch * by_hand.STEPS + batch)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if len(taken) == ends_after:  # by now, the callback has backed up the last step
                raise Interrupted

    with strategy().scope():
        model = by_hand.model(is_true)
    backup = kdist.callbacks.BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
    try:
        by_hand.fit(model, EPOCHS, backup, *callbacks, Steps())
    except Interrupted:
        backup._manager.wait()
    kdist.barrier()
    return [float(v) for part in model.get_weights() for v in np.ravel(part)], taken


def check_resumed(weights: list[float], taken: list[int]) -> None:
    assert taken == list(range(STOP, EPOCHS * by_hand.STEPS))
    np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)


# Paths -------------------------------------------------------------------------------------------------------


def in_worker_write_everywhere(folder: str) -> Any:
    import keras

    import kdist

    keras.utils.set_random_seed(3)
    fit(f"{folder}/backup", STOP, True)
    log = kdist.callbacks.RunLog(f"{folder}/läufe/log", every=1)
    best = keras.callbacks.ModelCheckpoint(f"{folder}/größte-{{epoch}}.keras")
    rows = keras.callbacks.CSVLogger(f"{folder}/zeilen.csv")
    check_resumed(*fit(f"{folder}/backup", None, False, log, best, rows))
    with strategy().scope():
        model = by_hand.model()
    manager = kdist.CheckpointManager(kdist.Checkpoint(model=model), f"{folder}/punkte", max_to_keep=2)
    for _ in range(3):
        manager.save()
    manager.wait()
    model.set_weights([0 * part for part in model.get_weights()])
    path = manager.restore_or_initialize()
    assert_equal(model.get_weights(), by_hand.start())
    kdist.barrier()
    assert path == kdist.latest_checkpoint(f"{folder}/punkte")
    loaded = keras.models.load_model(f"{folder}/größte-{EPOCHS}.keras")
    return path, [float(v) for part in loaded.get_weights() for v in np.ravel(part)]


@pytest.mark.kills(paths_only_in_ascii="[torch]")
@each_backend
def test_symlinked_and_non_ascii_directories(backend: str, tmp_path: Path) -> None:
    real, link = tmp_path / "real" / NAME, tmp_path / "línk"
    real.mkdir(parents=True)
    link.symlink_to(real)
    for path, weights in run(backend, 2, in_worker_write_everywhere, str(link)):
        assert path == f"{link}/punkte/ckpt-3"
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
    assert link.is_symlink()
    assert sorted(path.name for path in (real / "punkte").iterdir()) == ["ckpt-2", "ckpt-3"]
    assert sorted(path.name for path in (real / "läufe" / "log").iterdir()) == [
        "worker-0.jsonl",
        "worker-1.jsonl",
    ]
    models = [f"größte-{epoch}.keras" for epoch in range(2, EPOCHS + 1)]  # the resumed job skips epoch 1
    expected = ["backup", "läufe", "punkte", "zeilen.csv", *models]
    assert sorted(path.name for path in real.iterdir()) == sorted(expected)
    assert len((real / "zeilen.csv").read_text(encoding="utf-8").splitlines()) == EPOCHS


# Clocks ------------------------------------------------------------------------------------------------------


def in_worker_fit(folder: str, ends_after: int | None, is_true: bool) -> Any:
    return fit(folder, ends_after, is_true)


@pytest.mark.kills(clock_of_files_orders_backups="[torch]")
@each_backend
def test_a_job_resumes_if_the_times_of_files_are_wrong(backend: str, tmp_path: Path) -> None:
    for name, at in (("past", 10.0), ("future", time.time() + 1e8)):
        folder = tmp_path / name
        for _, taken in run(backend, 2, in_worker_fit, str(folder), STOP, True):
            assert taken == list(range(STOP))
        # The oldest backup seems to be the newest backup, or vice versa.
        for number, path in enumerate(sorted(folder.rglob("*"), reverse=name == "past")):
            os.utime(path, (at - number, at - number))
        for weights, taken in run(backend, 2, in_worker_fit, str(folder), None, False):
            check_resumed(weights, taken)


def in_worker_save_with_clock(folder: str, ahead: float) -> Any:
    """Trains in a process whose clock is ahead, or behind."""
    real = time.time
    time.time = lambda: real() + ahead
    try:
        return fit(folder, STOP if ahead > 0 else 2, True)[1], sorted(os.listdir(folder))
    finally:
        time.time = real


@pytest.mark.kills(clock_that_is_behind_hides_a_backup="[torch]")
@each_backend
def test_a_job_resumes_on_a_machine_whose_clock_is_behind(backend: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "backup")
    for ahead, taken, number in ((3600.0, [*range(STOP)], STOP), (-3600.0, [STOP, STOP + 1], STOP + 2)):
        for steps, names in run(backend, 2, in_worker_save_with_clock, folder, ahead):
            assert steps == taken
            assert names == [f"ckpt-{number - 1}", f"ckpt-{number}"]
    for weights, steps in run(backend, 2, in_worker_fit, folder, None, False):
        assert steps == list(range(STOP + 2, EPOCHS * by_hand.STEPS))
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
