"""Restores without a checkpoint, saves that fail on one worker, and wrong arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
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


def in_worker_failed_save(folder: str) -> list[str]:
    """Saves on worker 0 only, then on all workers; returns the names in the directory."""
    import keras

    from tests.helpers.processes import strategy

    with strategy().scope():
        checkpoint = kdist.Checkpoint(variable=keras.Variable(1.0))
    with pytest.raises(kdist.errors.WorkerMismatchError, match="called different methods"):
        if strategy().runtime.worker_index == 0:
            checkpoint.save(folder)
        else:
            kdist.barrier("another method")
    checkpoint.save(folder, asynchronous=False)
    return sorted(os.listdir(folder))


@pytest.mark.kills("failed_save_leaves_its_files")
def test_a_save_that_other_workers_do_not_call_leaves_nothing(tmp_path: Path) -> None:
    assert run("torch", 2, in_worker_failed_save, str(tmp_path)) == [["ckpt-1"]] * 2


def in_worker_verify(folder: str) -> int:
    """Verifies a checkpoint while a new one replaces it; returns the number of its arrays."""
    from kdist.checkpoint import checked_reading

    def save(start: float) -> None:
        arrays = {f"w{i}": np.full(100_000, start + i) for i in range(20)}
        kdist.Checkpoint(random=False, **arrays).write(folder, asynchronous=False)

    save(1.0)
    read = checked_reading._Shard.read

    def read_after_a_save(*args: Any) -> Any:
        checked_reading._Shard.read = read  # type: ignore[method-assign]
        save(2.0)
        return read(*args)

    checked_reading._Shard.read = read_after_a_save  # type: ignore[method-assign]
    return sum(tensor.name.startswith("w") for tensor in checked_reading.verify(folder).tensors)


@pytest.mark.kills("verified_files_not_kept_open")
def test_a_checkpoint_can_be_verified_while_another_one_replaces_it(tmp_path: Path) -> None:
    assert run("torch", 1, in_worker_verify, str(tmp_path / "best")) == [20]


def in_worker_wrong_arguments(folder: str) -> list[str]:
    found = []
    manager = kdist.CheckpointManager(kdist.Checkpoint(epoch=1), folder, max_to_keep=None)
    for call in (
        lambda: kdist.Checkpoint(epoch=1).save(""),
        lambda: kdist.Checkpoint(epoch=np.longdouble(1)).save(folder),
        lambda: kdist.CheckpointManager(kdist.Checkpoint(epoch=1), folder, 1, checkpoint_name="a\nb"),
        lambda: manager.save(checkpoint_number=-1),
        lambda: manager.save(checkpoint_number=1.5),  # type: ignore[arg-type]
        lambda: kdist.callbacks.BackupAndRestore("backup", every_seconds=float("nan")),
        lambda: kdist.callbacks.BackupAndRestore("backup", save_freq=None, every_seconds="5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(kdist.errors.InvalidArgumentError) as caught:
            call()
        found.append(str(caught.value).partition(".")[0])
    return found


@pytest.mark.kills(
    "checkpoint_in_an_empty_directory", "backup_every_nan_seconds", "checkpoint_name_never_found"
)
def test_wrong_values_directories_numbers_and_times_are_errors(tmp_path: Path) -> None:
    value = "Cannot save 'epoch': a checkpoint cannot contain an object of this type"
    name = "`checkpoint_name` is empty, contains a slash or a line break, or starts with a dot"
    number = "`checkpoint_number` is not a whole number of at least 0"
    time = "`every_seconds` is not a positive number"
    assert run("torch", 1, in_worker_wrong_arguments, str(tmp_path)) == [
        ["The directory of the checkpoints is empty", value, name, number, number, time, time]
    ]


def in_worker_interrupted(folder: str) -> tuple[str, list[str]]:
    """Interrupts one worker in a synchronous save; returns the error of all, and the files after the next save."""
    from unittest import mock

    from tests.helpers.processes import strategy

    index = strategy().runtime.worker_index
    checkpoint = kdist.Checkpoint(epoch=1)
    interrupt = mock.patch("kdist.checkpoint.writing.write_shard", side_effect=KeyboardInterrupt)
    with pytest.raises(kdist.errors.CheckpointError) as caught, strategy().scope():
        if index == 1:
            with interrupt, pytest.raises(KeyboardInterrupt):
                checkpoint.save(folder, asynchronous=False)
            checkpoint.wait()
        checkpoint.save(folder, asynchronous=False)
    with strategy().scope():
        checkpoint.save(folder, asynchronous=False)
    return str(caught.value), os.listdir(folder)


@pytest.mark.kills("interrupted_save_not_reported")
def test_an_interrupted_save_fails_on_all_workers_and_leaves_no_files(tmp_path: Path) -> None:
    for said, files in run("torch", 2, in_worker_interrupted, str(tmp_path)):
        assert "Worker 1 could not write its shard: KeyboardInterrupt" in said
        assert files == ["ckpt-2"]


def in_worker_native_variables(folder: str) -> list[str]:
    import keras

    if keras.backend.backend() == "torch":
        import torch

        variable: Any = torch.nn.Parameter(torch.zeros(1))
    else:
        import tensorflow as tf

        variable = tf.Variable(0.0)
    found = []
    for objects in ({"epoch": variable}, {"epoch": {"now": [1, variable]}}):
        with pytest.raises(kdist.errors.InvalidArgumentError) as caught:
            kdist.Checkpoint(**objects).save(folder)
        found.append(str(caught.value).partition(":")[0])
    return found


@pytest.mark.kills("native_variables_in_checkpoints")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_variable_of_the_backend_is_an_error(backend: str, tmp_path: Path) -> None:
    # A restore would not assign to it, and a script from `tf.train` would silently start with epoch 0.
    assert run(backend, 1, in_worker_native_variables, str(tmp_path)) == [
        ["Cannot save 'epoch'", "Cannot save 'epoch/now/1'"]
    ]
