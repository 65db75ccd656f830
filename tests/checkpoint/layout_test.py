"""The checkpoints in a directory, and the latest checkpoint."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdist
from kdist.checkpoint import layout
from kdist.checkpoint.folders import clean
from kdist.checkpoint.index import dump
from tests.checkpoint.shards_test import an_index


def make(folder, name, saved_at):
    (folder / name).mkdir(parents=True)
    index = dataclasses.replace(an_index(), saved_at=saved_at)
    (folder / name / "index.json").write_bytes(dump(index))


@pytest.mark.kills("checkpoint_latest_by_number")
def test_the_latest_is_the_one_that_was_saved_last(tmp_path):
    assert kdist.latest_checkpoint(tmp_path / "nothing") is None
    make(tmp_path, "ckpt-9", 5.0)
    make(tmp_path, "ckpt-10", 4.0)  # later, the job returned to an earlier step
    make(tmp_path, "ckpt-1", 3.0)
    make(tmp_path, "other-3", 9.0)
    make(tmp_path, ".ckpt.tmp-00000000000000aa", 10.0)  # a save that was killed just before its end
    (tmp_path / "ckpt-77").mkdir()
    (tmp_path / "ckpt-no").write_text("no checkpoint")
    assert [found.number for found in layout.find(tmp_path, "ckpt")] == [1, 10, 9]
    assert kdist.latest_checkpoint(tmp_path) == str(tmp_path / "other-3")
    assert kdist.latest_checkpoint(tmp_path, "ckpt") == str(tmp_path / "ckpt-9")
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path, copied, copy_function=shutil.copyfile)  # new times on all files
    assert kdist.latest_checkpoint(copied, "ckpt") == str(copied / "ckpt-9")


@pytest.mark.kills("checkpoint_replaced_one_lost", "checkpoint_replaced_one_unreadable")
def test_one_that_is_being_replaced_still_counts(tmp_path):
    make(tmp_path, "ckpt-1", 1.0)
    os.rename(tmp_path / "ckpt-1", tmp_path / ".ckpt-1.old-00000000000000aa")  # killed between two renames
    assert layout.find(tmp_path)[0].path == str(tmp_path / ".ckpt-1.old-00000000000000aa")
    assert layout.standing(tmp_path / "ckpt-1") == str(tmp_path / ".ckpt-1.old-00000000000000aa")
    assert layout.standing(tmp_path / "ckpt-2") == str(tmp_path / "ckpt-2")
    clean(str(tmp_path), set())
    assert kdist.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")
    make(tmp_path, ".ckpt-1.old-00000000000000bb", 0.5)
    assert layout.standing(tmp_path / "ckpt-1") == str(tmp_path / "ckpt-1")
    assert kdist.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")
    clean(str(tmp_path), set())
    assert os.listdir(tmp_path) == ["ckpt-1"]


@pytest.mark.kills("checkpoint_put_back_during_its_replacement")
def test_another_save_does_not_put_back_one_that_is_being_replaced(tmp_path):
    make(tmp_path, old := ".best.old-00000000000000aa", 1.0)
    make(tmp_path, new := ".best.tmp-00000000000000aa", 2.0)
    lock = os.open(tmp_path / new, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    clean(str(tmp_path), set())
    assert sorted(os.listdir(tmp_path)) == [old, new]
    os.close(lock)  # the save was killed
    clean(str(tmp_path), set())
    assert os.listdir(tmp_path) == ["best"]


@pytest.mark.kills("checkpoint_without_a_byte_in_its_index_kept")
def test_a_save_that_was_killed_before_the_first_byte_of_its_index_is_removed(tmp_path):
    make(tmp_path, ".ckpt.tmp-00000000000000aa", 1.0)
    make(tmp_path, foreign := ".ckpt.tmp-00000000000000bb", 1.0)
    (tmp_path / ".ckpt.tmp-00000000000000aa" / "index.json").write_bytes(b"")
    (tmp_path / foreign / "index.json").write_bytes(b"{}")
    clean(str(tmp_path), set())
    assert os.listdir(tmp_path) == [foreign]


names = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters=".-_"), min_size=1)


@given(names, st.integers(0, 10**9), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_names_are_read_as_they_were_made(prefix, number, token):
    name = layout.numbered(prefix, number)
    assert layout.temporary_of(layout.temporary(name, token)) == name
    assert layout.replaced_of(layout.replaced(name, token)) == name
    assert layout.temporary_of(layout.replaced(name, token)) is None
    assert layout.temporary_of(name) is None or name.startswith(".")
