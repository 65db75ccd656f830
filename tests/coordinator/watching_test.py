"""An evaluator picks the right checkpoint in a directory, only by paths and times."""

from __future__ import annotations

import os
import time

import pytest

from kdist.checkpoint import end_of_training
from kdist.coordinator.watching import Folder


def save(folder, name, saved_at):
    (folder / name).mkdir(parents=True)
    (folder / name / "index.json").write_text(f'{{"format": 1}}\n{{"saved_at": {saved_at}}}')


def write(folder, name, text, at):
    (folder / name).write_text(text)
    os.utime(folder / name, (at, at))


def test_the_newest_each_once_and_none_before(tmp_path):
    folder = Folder(str(tmp_path / "later"), 0.0)
    assert folder.newest() is None
    save(tmp_path / "later", "ckpt-2", 20)
    save(tmp_path / "later", "ckpt-1", 10)
    newest = folder.newest()
    assert newest.number == 2 and folder.newest() == newest
    folder.done_with(newest)
    assert folder.newest() is None
    save(tmp_path / "later", "ckpt-10", 30)
    assert folder.newest().number == 10


def test_one_that_is_passed_over_lets_an_older_one_come(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path, f"ckpt-{number}", number)
    folder = Folder(str(tmp_path), 0.0)
    folder.pass_over(folder.newest())
    assert folder.newest().number == 2
    folder.done_with(folder.newest())
    assert folder.newest() is None, "the one before is older than what was evaluated"


@pytest.mark.kills("evaluator_takes_half_files")
def test_a_file_counts_once_it_stays_the_same(tmp_path):
    folder = Folder(str(tmp_path), 0.1)
    write(tmp_path, "model.keras", "half", 10)
    assert folder.newest() is None and folder.is_waiting
    time.sleep(0.15)
    write(tmp_path, "model.keras", "whole", 11)
    assert folder.newest() is None and folder.is_waiting
    time.sleep(0.15)
    found = folder.newest()
    assert os.path.basename(found.path) == "model.keras" and not folder.is_waiting
    write(tmp_path, "model.keras", "again", 12)
    assert found.has_changed
    (tmp_path / "model.keras").unlink()
    assert found.has_changed


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model-07.keras", 7),
        ("07-0.31.keras", 7),
        ("weights.12-0.5.weights.h5", 12),
        ("resnet50-3.keras", 3),
        ("model.keras", None),
    ],
)
def test_numbers_of_files(tmp_path, name, number):
    write(tmp_path, name, "", 10)
    write(tmp_path, f".{name}.worker-0", "", 10)
    write(tmp_path, "notes.txt", "", 20)
    assert Folder(str(tmp_path), 0.0).newest().number == number


def test_the_sign_of_the_end(tmp_path):
    folder = str(tmp_path)
    end_of_training.end([folder, str(tmp_path / "not there")])
    assert end_of_training.has_ended(folder) and end_of_training.is_of_now(folder)
    assert os.listdir(folder) == [end_of_training.SIGN]
    os.utime(tmp_path / end_of_training.SIGN, (10, 10))
    assert end_of_training.has_ended(folder) and not end_of_training.is_of_now(folder), (
        "an earlier training has left it"
    )
    end_of_training.note_saved(folder)
    assert not end_of_training.has_ended(folder) and not end_of_training.is_of_now(folder)
    assert folder in end_of_training.saved_since(0.0) and folder not in end_of_training.saved_since(
        time.monotonic()
    )


@pytest.mark.kills("clock_of_the_file_system_ignored")
@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_sign_of_the_end_counts_by_the_clock_of_the_file_system(tmp_path, monkeypatch, ahead):
    folder, real = str(tmp_path), time.time
    monkeypatch.setattr(time, "time", lambda: real() - ahead)  # the file system is ahead of this process
    end_of_training._process_began_at.cache_clear()
    try:
        with end_of_training.watched(folder):
            end_of_training.end([folder])
            assert end_of_training.is_of_now(folder)
            began = end_of_training._process_began_at() + ahead
            os.utime(tmp_path / end_of_training.SIGN, (began - 60, began - 60))
            assert not end_of_training.is_of_now(folder), "an earlier training has left it"
    finally:
        monkeypatch.undo()
        end_of_training._process_began_at.cache_clear()
