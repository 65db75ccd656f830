"""Checkpoints from untrusted sources: kdist reads no other files, never hangs, and bounds its memory."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import zlib

import numpy as np
import pytest

from kdist.checkpoint import layout
from kdist.checkpoint.checked_reading import read_index, read_tensors, verify
from kdist.checkpoint.command import find
from kdist.checkpoint.folders import Folder, clean
from kdist.checkpoint.index import File, Index, Piece, Tensor, checksum_of, dump
from kdist.checkpoint.manager import _delete
from kdist.checkpoint.writing import publish
from kdist.errors import CheckpointCorruptError, CheckpointError

SHARD = "shard-00000-of-00001.safetensors"
CONTENT = b"head" + bytes(range(16))
GOOD = Index(
    saved_at=1700000000.0,
    id="abc",
    number=1,
    saved_by={"num_workers": 1},
    workers=[0],
    parts={"w": {"kind": "value", "aliases": []}},
    tensors=[Tensor("w", "uint8", (4, 4), (Piece(0, 0, 16, 4, zlib.crc32(CONTENT[4:])),))],
    files=[File(SHARD, 20, 4, zlib.crc32(b"head"))],
)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint of 16 bytes, with some fields of its index changed; returns its path."""
    folder = tmp_path / "deep" / "ckpt-1"
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(CONTENT)

    def write(**changes):
        (folder / "index.json").write_bytes(dump(dataclasses.replace(GOOD, **changes)))
        return str(folder)

    return write


def read(path):
    index = read_index(path)
    return read_tensors(path, index, index.tensors)


def refuse(path, error=CheckpointCorruptError, match=""):
    for reader in (read, verify):
        with pytest.raises(error, match=match):
            reader(path)


def test_what_kdist_wrote_is_read(checkpoint):
    path = checkpoint()
    assert read(path)["w"].tobytes() == CONTENT[4:]
    assert verify(path) == GOOD


@pytest.mark.kills("checkpoint_shard_outside_of_it")
@pytest.mark.parametrize("kind", ["above", "absolute", "other", "hidden"])
def test_a_shard_outside_of_the_checkpoint_is_refused(checkpoint, tmp_path, kind):
    (tmp_path / "secret.bin").write_bytes(CONTENT)
    name = {
        "above": f"../../{SHARD}",
        "absolute": str(tmp_path / "secret.bin"),
        "other": "weights.bin",
        "hidden": f"{SHARD}\n",
    }[kind]
    refuse(checkpoint(files=[dataclasses.replace(GOOD.files[0], name=name)]), match="fields")


def test_a_shard_that_is_a_link_is_refused(checkpoint, tmp_path):
    (tmp_path / "secret.bin").write_bytes(CONTENT)
    path = checkpoint()
    os.unlink(os.path.join(path, SHARD))
    os.symlink(tmp_path / "secret.bin", os.path.join(path, SHARD))
    refuse(path, match="regular file")


@pytest.mark.kills("checkpoint_pipe_waited_for")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [SHARD, "index.json"])
def test_a_pipe_does_not_hang_the_reader(checkpoint, name):
    path = checkpoint()
    os.unlink(os.path.join(path, name))
    os.mkfifo(os.path.join(path, name))
    refuse(path, match="regular file")
    assert find(os.path.dirname(path)) in (path, os.path.dirname(path))


@pytest.mark.parametrize(
    "piece",
    [
        {"offset": 5},
        {"offset": -4},
        {"offset": 3},
        {"offset": 2**70},
        {"offset": 4.0},
        {"offset": True},
        {"file": True},
    ],
    ids=str,
)
def test_a_piece_outside_of_its_file_is_refused(checkpoint, piece):
    tensor = dataclasses.replace(
        GOOD.tensors[0], pieces=(dataclasses.replace(GOOD.tensors[0].pieces[0], **piece),)
    )
    refuse(checkpoint(tensors=[tensor]), match="fields")


def limited(reader, path):
    """Reads with at most 256 MiB more memory than this process already has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        reader(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.kills("checkpoint_pieces_beyond_their_file")
@pytest.mark.parametrize("said", [20, 2**40])
def test_no_tensor_is_allocated_that_the_files_cannot_hold(checkpoint, said):
    size = 2**40 - 4
    tensor = dataclasses.replace(GOOD.tensors[0], shape=(size,), pieces=(Piece(0, 0, size, 4, 0),))
    path = checkpoint(tensors=[tensor], files=[dataclasses.replace(GOOD.files[0], num_bytes=said)])
    for reader in (read, verify):
        with pytest.raises(CheckpointCorruptError, match="fields|size of a shard"):
            limited(reader, path)


@pytest.mark.kills("replaced_checkpoint_is_corrupt")
@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "deleted"])
def test_a_checkpoint_that_is_replaced_during_a_read_is_read(is_replaced, checkpoint, monkeypatch):
    path = checkpoint()
    other = os.path.join(path, "other")
    empty = np.empty

    def replace(*args, **kwargs):  # called when all files are open
        with open(other, "wb") as file:
            file.write(bytes(20))
        os.rename(other, os.path.join(path, SHARD)) if is_replaced else os.unlink(os.path.join(path, SHARD))
        return empty(*args, **kwargs)

    monkeypatch.setattr(np, "empty", replace)
    assert read(path)["w"].tobytes() == CONTENT[4:]


def test_pieces_may_not_share_bytes(checkpoint):
    # Otherwise, the index of a small file could list tensors of any number and size.
    twice = [dataclasses.replace(GOOD.tensors[0], name=name) for name in ("v", "w")]
    refuse(checkpoint(tensors=twice), match="fields")


def test_a_header_larger_than_its_file_is_refused(checkpoint):
    refuse(checkpoint(files=[dataclasses.replace(GOOD.files[0], header_bytes=2**40)]), match="fields")


def test_deep_json_is_an_error_of_kdist(checkpoint):
    body = b'"values": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path = checkpoint()
    head = b'{"format": "kdist.checkpoint", "version": 1, "crc32": "%08x",\n' % checksum_of(1, body)
    with open(os.path.join(path, "index.json"), "wb") as file:
        file.write(head + body)
    refuse(path, match="RecursionError")


@pytest.mark.parametrize(
    "changes",
    [
        {"saved_at": float("nan")},
        {"saved_at": "now"},
        {"parts": {"w": {"kind": "model"}}},
        {"parts": {"w": 3}},
        {"states": {"data": []}},
        {"states": {"data": 3}},
        {"workers": "01"},
        {"number": "../12"},
        {"values": [1]},
        {"configs": None},
        {"saved_by": 3},
    ],
    ids=str,
)
def test_fields_of_another_kind_are_refused(checkpoint, changes):
    with pytest.raises(CheckpointCorruptError, match="fields"):
        read_index(checkpoint(**changes))


@pytest.mark.kills("checkpoint_cleaning_removes_others")
def test_cleaning_removes_only_what_kdist_made(tmp_path):
    token = "0123456789abcdef"
    foreign = tmp_path / layout.temporary("data", token)
    foreign.mkdir()
    (foreign / "index.json").write_text(json.dumps({"mine": 1}))
    (foreign / "photo.jpg").write_bytes(b"1")
    aside = tmp_path / layout.replaced("data", token)
    aside.mkdir()
    (aside / "photo.jpg").write_bytes(b"1")
    short = tmp_path / ".data.tmp-1"
    short.mkdir()
    link = tmp_path / layout.temporary("link", token)
    link.symlink_to(short)
    left = tmp_path / layout.temporary("ckpt", token)
    left.mkdir()
    for name in (layout.shard(0, 2), layout.report(0), layout.failure(1) + ".part"):
        (left / name).write_bytes(b"1")
    clean(str(tmp_path), set())
    assert sorted(os.listdir(tmp_path)) == sorted([foreign.name, aside.name, short.name, link.name])
    assert sorted(os.listdir(foreign)) == ["index.json", "photo.jpg"]


def test_a_save_replaces_only_a_checkpoint(tmp_path):
    mine = tmp_path / "results"
    mine.mkdir()
    (mine / "index.json").write_text("{}")
    new = tmp_path / layout.temporary("results", "0123456789abcdef")
    new.mkdir()
    with pytest.raises(CheckpointError, match="its path exists and is not a checkpoint"):
        publish(Folder(str(new), str(mine), [0], 0, "0123456789abcdef"))
    assert (mine / "index.json").read_text() == "{}"


def test_the_manager_deletes_only_checkpoints(tmp_path, checkpoint):
    foreign = tmp_path / "ckpt-3"
    foreign.mkdir()
    (foreign / "index.json").write_text("{}")
    for path in (str(foreign), checkpoint()):
        _delete(path)
        assert os.path.exists(path) == (path == str(foreign))


def test_an_unreadable_index_is_an_error_of_kdist(checkpoint):
    path = checkpoint()
    os.unlink(os.path.join(path, "index.json"))
    os.mkdir(os.path.join(path, "index.json"))
    refuse(path, CheckpointError, match="regular file")
