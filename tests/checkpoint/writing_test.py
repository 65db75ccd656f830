"""Workers write a checkpoint in a fixed order, and the chief waits for the reports of the other workers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time

import numpy as np
import pytest

from kdist.checkpoint import layout, writing
from kdist.checkpoint.checked_reading import read_index
from kdist.checkpoint.folders import Folder
from kdist.checkpoint.index import Tensor, parse
from kdist.checkpoint.shards import Span, cut, number_of_shards
from kdist.errors import CheckpointError

FACTS = {"id": "0f", "number": 1, "saved_by": {}, "parts": {}}


def folder_in(path, lost):
    return Folder(str(path), str(path / "ckpt"), [0, 3], 0, "token", lost=lost)


@pytest.mark.kills("checkpoint_reports_not_awaited")
def test_nobody_waits_for_a_worker_that_is_lost(tmp_path):
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="Worker 3 did not write its shard"):
        writing.wait_for(folder_in(tmp_path, lambda: {3}), 1)
    assert time.monotonic() - began < writing._PATIENCE_HEARTBEATS


def test_a_report_counts_though_its_worker_was_lost_afterwards(tmp_path):
    (tmp_path / layout.report(1)).write_text(json.dumps({"file": "x"}))
    assert writing.wait_for(folder_in(tmp_path, lambda: {3}), 1) == {"file": "x"}


@pytest.mark.kills("checkpoint_reports_not_awaited")
def test_the_loss_of_another_one_is_waited_out(tmp_path):
    asked = []

    def lost():
        asked.append(True)
        if len(asked) == 2:
            (tmp_path / layout.report(1)).write_text("1")
        return {2}

    assert writing.wait_for(folder_in(tmp_path, lost), 1) == 1
    assert len(asked) == 2


@pytest.mark.kills("checkpoint_failure_without_its_reason")
def test_who_finds_a_failure_finds_its_reason(tmp_path, monkeypatch):
    folder = dataclasses.replace(folder_in(tmp_path, set), rank=1)
    known = []
    write = os.write

    def watched(fd, data):
        known.append(os.path.exists(tmp_path / layout.failure(1)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    writing.abandon(folder, OSError("no space"))
    assert known == [False]
    with pytest.raises(CheckpointError, match="Worker 3 could not write its shard: OSError: no space"):
        writing.wait_for(folder_in(tmp_path, set), 1)


def share():
    return writing.Share([Tensor("w", "uint8", (4,))], [Span(0, 0, 4)], 1, lambda: [b"1234"], FACTS, {})


@pytest.mark.kills("checkpoint_of_another_job_replaced")
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_checkpoint_of_another_job_with_the_same_number_stays(is_seen, tmp_path, monkeypatch):
    for who in ("one", "other"):
        (tmp_path / who).mkdir()
        folder = Folder(str(tmp_path / who), str(tmp_path / "ckpt-1"), [0], 0, who, number=1)
        save = writing.Save(folder)
        if who == "other" and not is_seen:  # it is published between the check and the rename
            exists = iter([False, True])
            monkeypatch.setattr(os.path, "lexists", lambda path, exists=exists: next(exists))
        save.start(dataclasses.replace(share(), facts={**FACTS, "id": who}), background=False)
    assert "another job has just saved a checkpoint" in save.join()
    assert read_index(tmp_path / "ckpt-1").id == "one"
    assert os.listdir(tmp_path) == ["ckpt-1"]


def priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.kills("checkpoint_writer_hardly_runs")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priorities of their own")
def test_whoever_writes_is_a_little_less_important_than_whoever_trains(tmp_path):
    """The difference is small, because the chief waits for the writer, and a slow chief seems to hang."""
    seen = []

    def read():
        seen.append(priority())
        return [b"1234"]

    def train():  # the training thread already has a lower priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority() + 2)
        seen.append(priority())
        (tmp_path / "new").mkdir()
        folder = Folder(str(tmp_path / "new"), str(tmp_path / "ckpt-1"), [0], 0, "0f")
        save = writing.Save(folder)
        save.start(dataclasses.replace(share(), read=read))
        save.join()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert seen == [priority() + 2, min(19, priority() + 2 + 5)]


@pytest.mark.kills(
    "checkpoint_name_not_on_disk", "checkpoint_rename_before_fsync", "checkpoint_shard_not_on_disk"
)
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
def test_all_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a loss of power, a machine has only the synchronized files, so the order matters."""
    done = []
    real = {name: getattr(os, name) for name in ("fsync", "rename")}

    def fsync(fd):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        real["fsync"](fd)

    def rename(old, new):
        done.append(("name", os.path.basename(new)))
        real["rename"](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(writing, "remove", lambda folder: done.append(("remove", os.path.basename(folder))))
    for _ in range(2):  # the second save replaces the first
        (tmp_path / "new").mkdir()
        folder = Folder(str(tmp_path / "new"), str(tmp_path / "ckpt-1"), [0], 0, "0f")
        del done[:]
        writing.write_shard(folder, share())
        writing.commit(folder, share())
    shard, report = layout.shard(0, 1), layout.report(0)
    assert done == [
        ("sync", shard),
        ("sync", report + ".part"),
        ("name", report),
        ("sync", layout.INDEX),
        ("sync", "new"),
        ("name", layout.replaced("ckpt-1", "0f")),
        ("name", "ckpt-1"),
        ("sync", tmp_path.name),
        ("remove", layout.replaced("ckpt-1", "0f")),
    ]


@pytest.mark.kills("span_of_another_size_committed")
def test_a_span_of_another_size_is_not_committed(tmp_path):
    (tmp_path / "new").mkdir()
    save = writing.Save(Folder(str(tmp_path / "new"), str(tmp_path / "ckpt-1"), [0], 0, "0f"))
    save.start(dataclasses.replace(share(), read=lambda: [b"12"]))
    assert "a span has 2 bytes instead of 4" in save.join()
    assert os.listdir(tmp_path) == []


@pytest.mark.kills("checkpoint_of_many_tiny_shards")
def test_many_workers_write_few_shards(tmp_path):
    values = np.arange(100, dtype="uint8")
    tensor, workers = Tensor("w", "uint8", (100,)), range(12)
    number = number_of_shards(100, len(workers))
    assert number == 8
    (tmp_path / "new").mkdir()
    for rank in reversed(workers):
        spans = cut([tensor.size], rank, number) if rank < number else []
        read = lambda spans=spans: [values[span.first : span.last] for span in spans]  # noqa: E731
        each = writing.Share([tensor], spans, number, read, FACTS, {"rank": rank})
        folder = Folder(str(tmp_path / "new"), str(tmp_path / "ckpt-1"), list(workers), rank, "0f")
        writing.write_shard(folder, each)
    writing.commit(folder, each)
    assert sorted(os.listdir(tmp_path / "ckpt-1")) == [layout.INDEX, *(layout.shard(i, 8) for i in range(8))]
    with open(tmp_path / "ckpt-1" / layout.INDEX, "rb") as file:
        index = parse(file.read(), layout.INDEX)
    assert index.states == {"rank": list(workers)}
    saved = b""
    for piece in index.tensors[0].pieces:
        data = (tmp_path / "ckpt-1" / index.files[piece.file].name).read_bytes()
        saved += data[piece.offset : piece.offset + piece.last - piece.first]
    assert saved == values.tobytes()
