"""Checkpoints in an object store: when they exist, how they are checked, and what is removed. Without a backend."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kdist
from kdist import command_line
from kdist.checkpoint import layout, storage, writing
from kdist.checkpoint.checked_reading import read_index, read_tensors, verify
from kdist.checkpoint.folders import Folder
from kdist.checkpoint.index import Tensor
from kdist.checkpoint.shards import Span
from kdist.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from tests.helpers.environment import ROOT
from tests.helpers.object_store import ObjectStore, get, keys, put, register
from tests.helpers.scripts import run_python

RUN = "shelf://bucket/run"
A, B = "a" * 16, "b" * 16
PARTS = [b"12345678", b"abcd"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    register(tmp_path)
    return tmp_path


def save(
    name: str, token: str = A, number: int | None = None, workers: int = 1, parts: Any = PARTS
) -> str | None:
    """Saves two tensors; returns the error, if any."""
    url = f"{RUN}/{name}"
    folder = Folder(url, url, range(workers), 0, token, number=number, tag=f"-{token}")
    spans = [Span(0, 0, 8), Span(1, 0, 4)]
    tensors = [Tensor("v", "uint8", (8,)), Tensor("w", "uint8", (4,))]
    facts = {"id": token, "number": number, "saved_by": {}, "parts": {}}
    running = writing.Save(folder)
    running.start(writing.Share(tensors, spans, 1, lambda: parts, facts, {}), background=False)
    return running.join()


def shard(name: str, token: str = A) -> str:
    return f"bucket/run/{name}/shard-00000-of-00001-{token}.safetensors"


def test_a_save_leaves_its_index_and_its_shard(root: Path) -> None:
    assert save("ckpt-1") is None
    assert keys(root) == ["bucket/run/ckpt-1/index.json", shard("ckpt-1")]
    index = verify(f"{RUN}/ckpt-1/")
    tensors = read_tensors(f"{RUN}/ckpt-1", index, index.tensors)
    assert {name: value.tobytes() for name, value in tensors.items()} == {"v": PARTS[0], "w": PARTS[1]}


@pytest.mark.kills("store_listing_of_the_past", "checkpoint_without_an_index_counts")
def test_the_latest_is_the_one_that_was_saved_last(root: Path) -> None:
    assert kdist.latest_checkpoint(RUN) is None
    for name in ("ckpt-9", "ckpt-10"):
        assert save(name) is None
    put(root, "bucket/run/ckpt-11/index.json", b"{}", 5)  # of another program
    put(root, shard("ckpt-12"), b"not complete")
    put(root, "bucket/run/ckpt-13", b"an object, not a directory")
    assert kdist.latest_checkpoint(f"{RUN}/") == f"{RUN}/ckpt-10"
    assert [found.number for found in layout.find(RUN)] == [11, 9, 10]
    assert save("best-1") is None
    assert (kdist.latest_checkpoint(RUN), kdist.latest_checkpoint(RUN, "ckpt")) == (
        f"{RUN}/best-1",
        f"{RUN}/ckpt-10",
    )
    with pytest.raises(CheckpointNotFoundError, match=r"contains no index.json[\s\S]*best-1"):
        read_index(f"{RUN}/ckpt-12")
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        read_index(f"{RUN}/ckpt-14")


@pytest.mark.kills("store_whole_objects_read")
def test_only_the_ranges_of_the_tensors_are_read(root: Path) -> None:
    assert save("ckpt-1") is None
    index = read_index(f"{RUN}/ckpt-1")
    wanted = [tensor for tensor in index.tensors if tensor.name == "w"]
    ObjectStore.reads.clear()
    assert read_tensors(f"{RUN}/ckpt-1", index, wanted)["w"].tobytes() == PARTS[1]
    begin = index.files[0].header_bytes + len(PARTS[0])
    assert ObjectStore.reads == [(shard("ckpt-1"), begin, begin + len(PARTS[1]))]


def test_damage_is_noticed_and_another_one_offered(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ckpt-1", "ckpt-2"):
        assert save(name) is None
    for key in ("bucket/run/ckpt-2/index.json", shard("ckpt-2")):
        good = get(root, key)
        for at in range(len(good)):
            put(root, key, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(CheckpointError):
                verify(f"{RUN}/ckpt-2")
        put(root, key, good)
    assert command_line.main(["checkpoint", "verify", RUN]) == 0
    put(root, shard("ckpt-2"), good[:-1])
    with pytest.raises(CheckpointCorruptError, match="size of a shard"):
        verify(f"{RUN}/ckpt-2")
    ObjectStore().rm_file(shard("ckpt-2"))
    with pytest.raises(CheckpointCorruptError, match=f"a shard is missing[\\s\\S]*{RUN}/ckpt-1"):
        verify(f"{RUN}/ckpt-2")
    assert command_line.main(["checkpoint", "verify", RUN]) == 1
    assert command_line.main(["checkpoint", "show", f"{RUN}/ckpt-1"]) == 0
    assert f"{RUN}/ckpt-2: complete and undamaged" in capsys.readouterr().out


@pytest.mark.kills(
    "store_leftovers_stay",
    "store_leftovers_removed_early",
    "store_leftovers_by_another_clock",
    "store_objects_of_others_removed",
)
def test_leftovers_of_killed_saves_are_removed_after_an_hour(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ckpt-1", "ckpt-2"):
        put(root, shard(name, B), b"1", 2)
        put(root, f"bucket/run/{name}/{layout.report(1, f'-{B}')}", b"1", 2)
    put(root, shard("ckpt-3", B), b"1", 2)
    put(root, f"bucket/run/ckpt-3/{layout.report(1, f'-{B}')}", b"1", 0.9)  # it may still be running
    put(root, "bucket/run/ckpt-4/photo.jpg", b"1", 2)
    put(root, shard("other", B), b"1", 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)  # the clock of this worker is wrong
    others = [key for key in keys(root) if "ckpt-1/" not in key and "ckpt-2/" not in key]
    assert save("ckpt-1") is None
    assert keys(root) == sorted(["bucket/run/ckpt-1/index.json", shard("ckpt-1"), *others])


@pytest.mark.kills("store_replaced_one_in_pieces", "store_replaced_one_stays")
def test_a_replaced_one_is_complete_until_the_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save("best") is None
    before = keys(root)
    seen = []
    monkeypatch.setattr(writing.faults, "point", lambda phase: seen.append(verify(f"{RUN}/best").id))
    assert save("best", B, parts=[b"ABCDEFGH", b"1234"]) is None
    assert len(seen) == 4 and {*seen} == {A}
    assert verify(f"{RUN}/best").id == B
    assert keys(root) == [key.replace(A, B) for key in before]


@pytest.mark.kills("checkpoint_of_another_job_replaced")
def test_a_checkpoint_of_another_job_stays(root: Path) -> None:
    assert save("ckpt-1", number=1) is None
    before = keys(root)
    assert "another job has just saved" in str(save("ckpt-1", B, number=1))
    put(root, "bucket/run/best/index.json", b"{}")
    assert "is not a checkpoint" in str(save("best", B))
    assert keys(root) == sorted([*before, "bucket/run/best/index.json"])


@pytest.mark.kills("store_committed_one_removed")
def test_an_index_whose_upload_seems_to_fail_keeps_its_shards(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = storage.Remote.put

    def put_without_answer(self: Any, path: str, data: bytes) -> None:
        original(self, path, data)
        raise TimeoutError("no answer")

    monkeypatch.setattr(storage.Remote, "put", put_without_answer)
    assert "no answer" in str(save("ckpt-1"))
    assert verify(f"{RUN}/ckpt-1").id == A


def test_a_failed_upload_removes_its_objects(root: Path) -> None:
    assert save("best") is None
    before = keys(root)
    ObjectStore.refuses = "best/index"
    assert "quota exceeded" in str(save("best", B))  # the index may have arrived, so the shard stays
    assert keys(root) == sorted([*before, shard("best", B), f"bucket/run/best/{layout.report(0, f'-{B}')}"])
    ObjectStore.refuses = ".json"
    assert "quota exceeded" in str(save("ckpt-1"))
    assert [key for key in keys(root) if "ckpt-1" in key] == []


@pytest.mark.kills("store_upload_without_a_sign")
def test_an_upload_shows_that_it_continues(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BEAT", 0.0)
    seen = []

    def parts() -> Any:
        for part in PARTS:
            yield memoryview(part)
            seen.append([(name, size) for name, size in storage.of(RUN).sizes(f"{RUN}/ckpt-1")])

    assert save("ckpt-1", parts=parts()) is None
    sign = f"shard-00000-of-00001-{A}.safetensors.part"
    assert seen == [[(sign, 2)], [(sign, 3)]]  # the header is the first part
    assert keys(root) == ["bucket/run/ckpt-1/index.json", shard("ckpt-1")]


@pytest.mark.kills("store_waits_by_many_requests")
def test_a_waiting_worker_reads_only_what_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_LOOK", 0.01)
    monkeypatch.setattr(writing, "_patience", lambda: 0.1)
    assert "Worker 1 did not write its shard" in str(save("ckpt-1", workers=3))
    assert [key for key, *_ in ObjectStore.reads if key.endswith(("failed", "00001.json"))] == []
    assert keys(root) == []


# URLs ---------------------------------------------------------------------------------------------------------


@pytest.mark.kills("store_url_as_a_path", "store_file_url_as_remote")
def test_urls_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage.absolute("s3://bucket/run/") == "s3://bucket/run"
    assert storage.absolute("memory://") == "memory://"
    assert storage.absolute("file:///data/run/") == storage.absolute("/data/run/") == "/data/run"
    assert storage.absolute(Path("run")) == f"{tmp_path}/run"
    assert storage.split("s3://bucket/run/best") == ("s3://bucket/run", "best")
    assert storage.split("memory://best") == ("memory://", "best")
    assert storage.split("/run/best") == ("/run", "best")
    assert isinstance(storage.of("a/b"), storage.Local)


@pytest.mark.kills("store_package_missing_unexplained")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    missing = {"class": "no_such_package.Files", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "gone", missing)
    with pytest.raises(CheckpointError, match=r"Install no_such_package[\s\S]*pip install '.\[remote\]'"):
        kdist.latest_checkpoint("gone://bucket/run")
    for url in ("unknown://bucket/run", "simplecache::memory://run"):
        with pytest.raises(CheckpointError, match="does not support its protocol"):
            kdist.latest_checkpoint(url)
    assert command_line.main(["checkpoint", "show", "gone://bucket/run"]) == 1
    storage._connected.cache_clear()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"pip install '.\[remote\]'"):
        kdist.latest_checkpoint("memory://run")


@pytest.mark.kills("store_error_hides_checkpoints")
def test_an_error_of_the_store_hides_no_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.object_store import StoreError

    assert save("ckpt-1") is None

    def fail(*args: Any, **kwargs: Any) -> None:
        raise StoreError("access denied")

    for method in ("cat_file", "ls"):
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, method, fail)
            with pytest.raises(CheckpointError, match="StoreError: access denied"):
                kdist.latest_checkpoint(RUN)
            with pytest.raises(CheckpointError, match="StoreError: access denied"):
                read_index(f"{RUN}/ckpt-1")


@pytest.mark.kills("store_replaced_one_in_pieces")
def test_names_of_shards(root: Path) -> None:
    assert save("ckpt-1") is None
    index = read_index(f"{RUN}/ckpt-1")
    assert index.files[0].name == layout.shard(0, 1, f"-{A}") != layout.shard(0, 1)
    assert layout.shards_in(get(root, "bucket/run/ckpt-1/index.json")) == {index.files[0].name}
    for name in (
        f"../{index.files[0].name}",
        index.files[0].name + "x",
        "shard-00000-of-00001-xyz.safetensors",
    ):
        assert not layout.is_shard(name)
    assert dataclasses.replace(index.files[0]) == index.files[0]


LOCAL = """
import sys
import kdist
from kdist.checkpoint.command import find
assert kdist.latest_checkpoint("nothing") is None and find("nothing").endswith("/nothing")
assert "fsspec" not in sys.modules
"""


@pytest.mark.kills("store_package_imported_for_paths")
def test_local_paths_do_not_import_fsspec(tmp_path: Path) -> None:
    run_python("-c", LOCAL, cwd=ROOT)
