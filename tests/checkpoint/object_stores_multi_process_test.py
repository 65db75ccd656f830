"""Jobs that save to an object store: any number of workers, killed saves, failing workers, managers and backups."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import jobs
from tests.checkpoint.paths_and_clocks_multi_process_test import STOP, check_resumed, fit
from tests.helpers.compare import assert_equal
from tests.helpers.environment import ROOT
from tests.helpers.object_store import ObjectStore, age, get, keys, register
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns, rank, run
from tests.helpers.scripts import RUN as KDIST_RUN
from tests.helpers.scripts import Script

RUN = "shelf://bucket/run"
KEY = re.compile(r"bucket/run/(?P<name>[^/]+)/(?P<file>.+?)(-[0-9a-f]{16})?(?P<suffix>\.[a-z]+)")


def files(root: Any) -> list[str]:
    """Returns the keys without their buckets and without the tokens of the saves."""
    matches = [KEY.fullmatch(key) for key in keys(root)]
    return sorted(f"{match['name']}/{match['file']}{match['suffix']}" for match in matches if match)


def whole(name: str, workers: int) -> list[str]:
    """Returns the files of a complete checkpoint."""
    return [
        f"{name}/index.json",
        *(f"{name}/shard-{i:05d}-of-{workers:05d}.safetensors" for i in range(workers)),
    ]


def in_worker_save(root: str) -> Any:
    import kdist

    register(root)
    model = jobs.make_model(seed=3)
    checkpoint = kdist.Checkpoint(model=model, epoch=1, rows=np.arange(6).reshape(2, 3))
    first = checkpoint.save(RUN, asynchronous=False)
    checkpoint.epoch = 2
    path = checkpoint.save(f"{RUN}/")
    checkpoint.wait()
    kdist.barrier()
    assert (first, path) == (f"{RUN}/ckpt-1", kdist.latest_checkpoint(RUN))
    return jobs.values_of(model)


def in_worker_restore(root: str) -> Any:
    import kdist

    register(root)
    model = jobs.make_model(seed=4)
    checkpoint = kdist.Checkpoint(model=model, epoch=0, rows=None)
    checkpoint.restore(kdist.latest_checkpoint(RUN)).assert_consumed()
    assert (checkpoint.epoch, checkpoint.rows.tolist()) == (2, [[0, 1, 2], [3, 4, 5]])
    return jobs.values_of(model)


@pytest.mark.kills(checkpoint_shards_overwritten="[torch]")
@each_backend
def test_any_number_of_workers_restores(backend: str, tmp_path: Path) -> None:
    values, other = run(backend, 2, in_worker_save, str(tmp_path))
    assert_equal(values, other)
    assert files(tmp_path) == [*whole("ckpt-1", 2), *whole("ckpt-2", 2)]
    for workers in (1, 2):
        for restored in run(backend, workers, in_worker_restore, str(tmp_path)):
            assert_equal(restored, values)


def in_worker_killed(root: str, phases: list[str]) -> list[tuple[int, int, list[str]]]:
    """Replaces a checkpoint in child processes that a fault kills; returns what each leaves."""
    import kdist
    from kdist import faults
    from kdist.checkpoint import writing
    from kdist.cluster.injection import Fault

    register(root)
    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=0)
    path = checkpoint.write(f"{RUN}/best", asynchronous=False)
    left = []
    for epoch, phase in enumerate(phases, 1):
        child = os.fork()
        if child == 0:
            if phase == "remove":
                writing.remove = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
            else:
                faults._ordered = lambda phase=phase: [Fault("kill", phase=phase)]
            try:
                checkpoint.epoch = epoch
                checkpoint.write(path, asynchronous=False)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = kdist.Checkpoint(model=jobs.make_model(seed=1), epoch=-1)
        found.read(path).assert_existing_objects_matched()
        left.append((status, found.epoch, files(root)))
        age(root, 2)
        checkpoint.write(path, asynchronous=False)
        assert files(root) == whole("best", 1)
    return left


@pytest.mark.in_turn(4)
@pytest.mark.kills("store_replaced_one_in_pieces", "store_index_not_last", "store_leftovers_stay")
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    phases = ["save-write", "save-report", "save-commit", "save-publish", "remove"]
    (left,) = run("torch", 1, in_worker_killed, str(tmp_path), phases)
    index, shard, report = *whole("best", 1), "best/shard-00000.json"
    assert left == [
        (-9, 0, [index, shard]),
        (-9, 0, sorted([index, report, shard, shard])),
        (-9, 0, sorted([index, report, shard, shard])),
        (-9, 0, sorted([index, report, shard, shard])),
        (-9, 5, sorted([index, report, shard, shard])),  # the new one is complete
    ]


def in_worker_failing(root: str, failing: int) -> str:
    import kdist

    register(root)
    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=1)
    path = checkpoint.save(RUN, asynchronous=False)
    kdist.barrier()
    ObjectStore.refuses = "safetensors" if rank() == failing else ""
    checkpoint.save(RUN)
    with pytest.raises(kdist.errors.CheckpointError) as caught:
        checkpoint.wait()
    ObjectStore.refuses = ""
    kdist.barrier()
    assert kdist.latest_checkpoint(RUN) == path
    checkpoint.restore(path).assert_consumed()
    kdist.barrier()
    last = checkpoint.save(RUN, asynchronous=False)
    assert kdist.latest_checkpoint(RUN) == last
    return str(caught.value)


@pytest.mark.kills(store_failure_not_told="[torch]")
@each_backend
def test_a_failed_upload_is_told_on_all_workers(backend: str, tmp_path: Path) -> None:
    for failing in (0, 1):
        root = tmp_path / str(failing)
        for text in run(backend, 2, in_worker_failing, str(root), failing):
            assert f"worker {failing}" in text.lower() and "quota exceeded" in text, text
        assert set(whole("ckpt-1", 2) + whole("ckpt-2", 2)) <= set(files(root))
        if failing == 1:  # the first worker may be the first to give up
            assert files(root) == [*whole("ckpt-1", 2), *whole("ckpt-2", 2)]


def in_worker_manage(root: str) -> list[str]:
    import kdist

    register(root)
    checkpoint = kdist.Checkpoint(model=jobs.make_model(), step=0)
    manager = kdist.CheckpointManager(checkpoint, f"{RUN}/", max_to_keep=2)
    assert manager.restore_or_initialize() is None and manager.directory == RUN
    for step in range(1, 5):
        checkpoint.step = step
        manager.save()
    manager.wait()
    kdist.barrier()
    assert manager.checkpoints == [f"{RUN}/ckpt-3", f"{RUN}/ckpt-4"]
    checkpoint.step = 0
    assert manager.restore_or_initialize() == f"{RUN}/ckpt-4" and checkpoint.step == 4
    hours = kdist.CheckpointManager(checkpoint, f"{RUN}-hours", 1, keep_checkpoint_every_n_hours=1e-9)
    for _ in range(3):
        hours.save(asynchronous=False)
    kdist.barrier()
    assert hours.checkpoints == [f"{RUN}-hours/ckpt-7"]
    return [key for key in ObjectStore.removed if key.startswith("bucket/run/ckpt-1/")]


@pytest.mark.kills(store_too_many_kept="[torch]", store_index_removed_last="[torch]")
@each_backend
def test_the_manager(backend: str, tmp_path: Path) -> None:
    removed, others = run(backend, 2, in_worker_manage, str(tmp_path))
    assert others == []
    of_the_save = [key for key in removed if "safetensors" in key or "index" in key]
    assert [key.partition("ckpt-1/")[2][:11] for key in of_the_save] == [
        "index.json",
        *["shard-00000", "shard-00001"],
    ]
    assert files(tmp_path) == [*whole("ckpt-3", 2), *whole("ckpt-4", 2)]
    kept = [key for key in keys(tmp_path) if key.startswith("bucket/run-hours/")]
    assert len(kept) == 1 + 3 * 3 and b'"kept": [5, 6]' in get(tmp_path, "bucket/run-hours/.ckpt.kept.json")


def in_worker_fit(root: str, ends_after: int | None, is_true: bool) -> Any:
    register(root)
    return fit(f"{RUN}/", ends_after, is_true)


def in_worker_fit_to_its_end(root: str) -> None:
    import kdist
    from tests.helpers import by_hand
    from tests.helpers.processes import strategy

    register(root)
    with strategy().scope():
        model = by_hand.model()
    by_hand.fit(model, 1, kdist.callbacks.BackupAndRestore(RUN, save_freq=1))
    kdist.barrier()


@pytest.mark.kills(store_backups_stay="[torch]")
@each_backend
def test_fit_resumes_from_a_backup_in_a_store(backend: str, tmp_path: Path) -> None:
    for _, taken in run(backend, 2, in_worker_fit, str(tmp_path), STOP, True):
        assert taken == [*range(STOP)]
    for weights, taken in run(backend, 2, in_worker_fit, str(tmp_path), None, False):
        check_resumed(weights, taken)
    other = tmp_path / "other"
    run(backend, 2, in_worker_fit_to_its_end, str(other))
    assert keys(other) == []


JOB = """
    import kdist
    from tests.helpers.object_store import register

    register({root!r})
    strategy = kdist.MultiWorkerMirroredStrategy()
    checkpoint = kdist.Checkpoint(epoch=2, random=False)
    checkpoint.write("{run}/best", asynchronous=False)
"""


def in_worker_write(root: str) -> None:
    import kdist

    register(root)
    kdist.Checkpoint(epoch=1, model=jobs.make_model()).write(f"{RUN}/best", asynchronous=False)
    kdist.barrier()


def in_worker_epoch(root: str) -> int:
    import kdist

    register(root)
    checkpoint = kdist.Checkpoint(model=jobs.make_model(), epoch=0)
    checkpoint.read(f"{RUN}/best").assert_consumed()
    return checkpoint.epoch


@each_backend_in_twelve_turns
def test_a_job_with_a_killed_worker_leaves_the_old_checkpoint(backend: str, tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    run(backend, 2, in_worker_write, root)
    for worker, phase in ((0, "save-publish"), (1, "save-write")):
        command = [*KDIST_RUN, "-n", "2", "--inject", f"kill:worker={worker},phase={phase}"]
        env = {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
        job = Script(tmp_path, phase, JOB.format(root=root, run=RUN), env, command)
        with job:
            assert job.wait() != 0
        assert "takes effect" in job.output()
        assert run(backend, 2, in_worker_epoch, root) == [1, 1]
