"""`checkpoint.restore(kdist.latest_checkpoint(folder))` also works when there is no checkpoint yet."""

from __future__ import annotations

from pathlib import Path

import pytest

import kdist
from tests.helpers.processes import run


def in_worker_start_twice(folder: str) -> list[float]:
    import keras

    from tests.helpers.processes import strategy

    found = []
    for start in (1.0, 2.0):
        with strategy().scope():
            variable = keras.Variable(start)
        checkpoint = kdist.Checkpoint(variable=variable)
        status = checkpoint.restore(kdist.latest_checkpoint(folder)).expect_partial()
        found.append(float(variable))
        if start == 1.0:
            with pytest.raises(kdist.errors.CheckpointMismatchError, match="variable"):
                status.assert_consumed()
            checkpoint.save(folder, asynchronous=False)
        else:
            status.assert_consumed()
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_without_a_checkpoint_nothing_is_restored(num_workers: int, tmp_path: Path) -> None:
    assert run("torch", num_workers, in_worker_start_twice, str(tmp_path)) == [[1.0, 1.0]] * num_workers


def in_worker_one_has_none(folder: str) -> str:
    import keras

    from tests.helpers.processes import strategy

    with strategy().scope():
        checkpoint = kdist.Checkpoint(variable=keras.Variable(1.0))
    path = checkpoint.save(folder, asynchronous=False)
    with pytest.raises(
        kdist.errors.WorkerMismatchError, match="Some workers restore a checkpoint, and others have none"
    ) as info:
        checkpoint.restore(None if strategy().runtime.worker_index else path)
    return str(info.value)


@pytest.mark.kills("restore_none_is_no_mismatch")
def test_one_worker_that_finds_no_checkpoint_is_named(tmp_path: Path) -> None:
    for said in run("torch", 2, in_worker_one_has_none, str(tmp_path)):
        assert "worker_0='a path', worker_1=None" in said


def in_worker_wrong_arguments() -> list[str]:
    found = []
    for call in (
        lambda: kdist.Checkpoint(epoch=1).save(""),
        lambda: kdist.callbacks.BackupAndRestore("backup", every_seconds=float("nan")),
        lambda: kdist.callbacks.BackupAndRestore("backup", save_freq=None, every_seconds="5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(kdist.errors.InvalidArgumentError) as caught:
            call()
        found.append(str(caught.value).partition(".")[0])
    return found


@pytest.mark.kills("checkpoint_in_an_empty_directory", "backup_every_nan_seconds")
def test_wrong_directories_and_times_are_errors() -> None:
    time = "`every_seconds` is not a positive number"
    assert run("torch", 1, in_worker_wrong_arguments) == [
        ["The directory of the checkpoints is empty", time, time]
    ]
