"""`BackupAndRestore` saves by the clock, survives damaged backups, and notices a termination.

The tests replace the clocks, so that a save is due after a known step.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.processes import run, strategy

EPOCHS = 10
ALL_STEPS = EPOCHS * by_hand.STEPS


def on(*backends: str) -> Any:
    """Runs a test only on some backends, because the tested code does not depend on the backend."""
    marked = [pytest.param(name, marks=pytest.mark.xdist_group(f"pool-{name}")) for name in backends]
    return pytest.mark.parametrize("backend", marked)


class Interrupted(Exception):
    """Stands for any interruption of a job."""


class Clock:
    """A clock that advances with the steps of the training, with a different speed on each worker."""

    def __init__(self, start: float, seconds: float) -> None:
        self.now, self.seconds = start, seconds

    def monotonic(self) -> float:
        return self.now


def fit(
    folder: str,
    ends_after: int | None = None,
    is_true: bool = True,
    act: Any = None,
    epochs: int = EPOCHS,
    **backup: Any,
) -> Any:
    """Trains on all workers of the pool, with backups.

    Args:
        folder: The directory of the backups.
        ends_after: The step after which the job is interrupted.
        is_true: Whether the model starts with the right weights; otherwise only a backup can provide them.
        act: A function to call after each step, before a save, with the step and this worker's clock.
        epochs: The number of epochs.
        **backup: Arguments of `BackupAndRestore`.

    Returns:
        The weights; the steps that ran, from 0; and the steps after which a backup was made, from 1.
    """
    import keras

    import kdist
    from kdist.training import backup_and_restore, preemption, voting

    index = int(os.environ["RANK"])
    clock = Clock(1000.0 * index, 1.0 + 2 * index)
    taken: list[int] = []
    saved: list[int] = []

    class Steps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            taken.append(self.epoch * by_hand.STEPS + batch)
            clock.now += clock.seconds
            if act is not None:
                act(taken[-1] + 1, clock)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if taken[-1] + 1 == ends_after:
                raise Interrupted

    class Backup(kdist.callbacks.BackupAndRestore):
        def _save(self) -> None:
            super()._save()
            saved.append(taken[-1] + 1)

        def wait(self) -> None:
            self._manager.wait()

    with strategy().scope():
        model = by_hand.model(is_true)
    backups = Backup(folder, **backup)
    times = [(module, module.time) for module in (backup_and_restore, voting, preemption)]
    try:
        for module, _ in times:
            module.time = clock
        by_hand.fit(model, epochs, Steps(), backups, Stop())
    except Interrupted:
        backups.wait()
    finally:
        for module, time in times:
            module.time = time
    return [float(v) for part in model.get_weights() for v in np.ravel(part)], taken, saved


def in_worker_by_the_clock(folder: str) -> Any:
    first = fit(folder, 25, save_freq=None, every_seconds=10)
    again = fit(folder, is_true=False, save_freq=None, every_seconds=10)
    both = fit(f"{folder}-both", save_freq=7, every_seconds=10)
    return first, again, both


@pytest.mark.in_turn(4)
@on("jax", "torch")
def test_backups_by_the_clock_of_the_chief(backend: str, tmp_path: Path) -> None:
    # A step takes one second of the chief's clock and three seconds of the other clock.
    for first, again, both in run(backend, 2, in_worker_by_the_clock, str(tmp_path / "backup")):
        assert first[1:] == (list(range(25)), [10, 20])
        assert again[1:] == (list(range(20, ALL_STEPS)), [30]), "it goes on from the last backup"
        assert both[2] == [7, 14, 21, 28], "each backup sets the clock back"
        for weights, *_ in (again, both):
            np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)


def in_worker_two_fits(folder: str) -> Any:
    """Calls `fit` twice with one directory, is interrupted in the second `fit`, and then runs again."""
    from kdist.training import backup_and_restore

    found = []
    for ends_after in (5, None):
        backup_and_restore._ended.clear()  # as in a new process
        found += [
            fit(folder, save_freq=2),
            fit(folder, ends_after, is_true=ends_after is not None, save_freq=2),
        ]
    return found, Path(folder).exists()


@on("torch")
def test_two_fits_with_one_directory_keep_their_backups_apart(backend: str, tmp_path: Path) -> None:
    for found, is_left in run(backend, 1, in_worker_two_fits, str(tmp_path / "backup")):
        starts = (0, 0, 0, 4)
        ends = (ALL_STEPS, 5, ALL_STEPS, ALL_STEPS)
        assert [steps for _, steps, _ in found] == list(map(list, map(range, starts, ends)))
        for weights, *_ in found[2:]:
            np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
        assert not is_left


def in_worker_fewer_epochs(folder: str) -> Any:
    import kdist

    fit(folder, 9, save_freq=2)
    with pytest.raises(kdist.errors.InvalidArgumentError, match="later epoch") as error:
        fit(folder, is_true=False, epochs=2)
    return str(error.value), fit(folder, is_true=False)


@on("torch")
def test_a_fit_of_fewer_epochs_does_not_delete_a_backup(backend: str, tmp_path: Path) -> None:
    for said, (weights, steps, _) in run(backend, 1, in_worker_fewer_epochs, str(tmp_path / "backup")):
        assert "epoch=3, epochs=2" in said
        assert steps == list(range(8, ALL_STEPS))
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)


# Damaged backups ----------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    """Damages a backup in ways that disks and people do."""
    shard = min(path.glob("shard-*-of-*.safetensors"))
    if how == "byte":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif how == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif how == "gone":
        shard.unlink()
    else:
        index = path / "index.json"
        os.truncate(index, index.stat().st_size // 2)


def in_worker_damaged(folder: str, how: str) -> Any:
    import kdist

    index = int(os.environ["RANK"])
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    own = f"{folder}/own-{index}"
    first = fit(f"{folder}/shared", 9, save_freq=2)
    fit(own, 9, save_freq=2)
    if index == 1:
        newest = [kdist.latest_checkpoint(name) for name in (f"{folder}/shared", own)]
        shutil.copytree(f"{folder}/shared", f"{folder}/lost")
        for path in (*newest, *Path(f"{folder}/lost").iterdir()):
            damage(Path(str(path)), how)
    kdist.barrier()
    logging.getLogger("kdist").addHandler(handler)
    try:
        found = [fit(name, is_true=False, save_freq=100) for name in (f"{folder}/shared", own)]
        found.append(fit(f"{folder}/lost", save_freq=100))
    finally:
        logging.getLogger("kdist").removeHandler(handler)
    return first, found, [text for text in warnings if "previous backup" in text or "first epoch" in text]


PAIRS = [("byte", "torch"), ("cut", "jax"), ("gone", "torch"), ("index", "torch")]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("how", "backend"),
    [pytest.param(*pair, marks=pytest.mark.xdist_group(f"pool-{pair[1]}")) for pair in PAIRS],
)
def test_a_damaged_backup_does_no_harm(how: str, backend: str, tmp_path: Path) -> None:
    for first, found, warnings in run(backend, 2, in_worker_damaged, str(tmp_path), how):
        assert first[2] == [2, 4, 6, 8]
        shared, own, lost = found
        # The newest backup is damaged for all workers. Then one worker, with its own directory, has a damaged
        # backup. Then both backups are damaged.
        assert [steps for _, steps, _ in found] == [list(range(n, ALL_STEPS)) for n in (6, 6, 0)]
        for weights, *_ in (shared, own, lost):
            np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
        assert len(warnings) == 5, warnings
        assert all("ckpt-4" in text for text in warnings[:3])
        assert "can be restored. Training starts from the first epoch." in warnings[4]


def in_worker_lost(folder: str, worker: int, names: list[str]) -> Any:
    """Loses backups of one worker, where each worker has its own directory."""
    import kdist

    own = f"{folder}/own-{os.environ['RANK']}"
    fit(own, 9, save_freq=2)
    there = sorted(os.listdir(own))
    if int(os.environ["RANK"]) == worker:
        for name in names:
            shutil.rmtree(f"{own}/{name}")
    kdist.barrier()
    # Other initial weights than the first time, unless no backup can be restored.
    return there, fit(own, is_true=len(names) == 2, save_freq=2), Path(own).exists()


@pytest.mark.kills("resume_own_newest_backup_restored")
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(("names", "begins"), [(["ckpt-4"], 6), (["ckpt-3", "ckpt-4"], 0)])
@on("torch")
def test_workers_resume_from_a_backup_that_all_have(
    backend: str, names: list[str], begins: int, worker: int, tmp_path: Path
) -> None:
    for there, (weights, steps, _), is_left in run(backend, 2, in_worker_lost, str(tmp_path), worker, names):
        assert there == ["ckpt-3", "ckpt-4"]
        assert steps == list(range(begins, ALL_STEPS))
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
        assert not is_left


# Termination --------------------------------------------------------------------------------------------------


class Left(Exception):
    """Raised by `exit_fn` instead of the end of the process."""


def leave() -> None:
    raise Left


def in_worker_grace(folder: str) -> Any:
    """Sends SIGTERM to one worker, which may continue for 30 seconds of its clock."""
    import kdist

    config = kdist.experimental.TerminationConfig(exit_fn=leave, grace_period=30)
    backup = {"save_freq": None, "termination_config": config}
    taken: list[int] = []

    def terminate(step: int, clock: Clock) -> None:
        taken.append(step)
        if step == 4 and clock.seconds > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Left):
        fit(folder, act=terminate, **backup)
    saved = [path.name for path in Path(folder).glob("ckpt-*")]
    kdist.barrier()
    return taken, saved, fit(folder, is_true=False, **backup)


@pytest.mark.in_turn(4)
@on("tensorflow", "torch")
def test_training_goes_on_until_the_grace_period_has_run_out(backend: str, tmp_path: Path) -> None:
    # That worker needs three seconds per step, so ten steps remain, and all workers save after the same step.
    for taken, saved, (weights, rest, _) in run(backend, 2, in_worker_grace, str(tmp_path / "backup")):
        assert taken == list(range(1, 15))
        assert saved == ["ckpt-1"]
        assert rest == list(range(14, ALL_STEPS))
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)


def in_worker_watcher(folder: str) -> Any:
    """Lets a function report that this worker will be terminated, while the other worker saves."""
    import threading

    import kdist
    from kdist.training import preemption

    index = int(os.environ["RANK"])
    near, asked, saved = threading.Event(), threading.Event(), []
    taken: list[int] = []

    def is_near() -> bool:
        if near.is_set() and not asked.is_set():
            asked.set()
            raise TimeoutError("the metadata server does not answer")
        return near.is_set() and index == 1

    def wait_for_notice(step: int, clock: Clock) -> None:
        taken.append(step)
        handlers.append(signal.getsignal(signal.SIGTERM))
        if step == 5:
            near.set()
            assert asked.wait(30)
            while index == 1 and watches[0]._noticed is None:
                os.sched_yield()

    handlers: list[Any] = [signal.getsignal(signal.SIGTERM)]
    watches: list[Any] = []
    init = preemption.TerminationWatch.__init__

    def noted(self: Any, *args: Any) -> None:
        watches.append(self)
        init(self, *args)

    config = kdist.experimental.TerminationConfig(
        termination_watcher_fn=is_near, exit_fn=leave, save_fn=lambda: saved.append(taken[-1])
    )
    preemption._LOOK_SECONDS, before = 0.02, preemption._LOOK_SECONDS
    preemption.TerminationWatch.__init__ = noted  # type: ignore[method-assign]
    try:
        with pytest.raises(Left):
            fit(folder, act=wait_for_notice, save_freq=None, termination_config=config)
    finally:
        preemption._LOOK_SECONDS = before
        preemption.TerminationWatch.__init__ = init  # type: ignore[method-assign]
    kdist.barrier()
    return taken, saved, len(set(handlers)), Path(folder).exists()


@pytest.mark.kills(preemption_watcher_ends_after_an_error="[jax]")
@on("jax")
def test_a_watcher_says_so_and_save_fn_saves(backend: str, tmp_path: Path) -> None:
    for taken, saved, num_handlers, has_backup in run(
        backend, 2, in_worker_watcher, str(tmp_path / "backup")
    ):
        assert taken == [1, 2, 3, 4, 5]
        assert saved == [5], "in place of the checkpoint's own"
        assert not has_backup
        assert num_handlers == 1, "SIGTERM means what it meant before"


def in_worker_no_backup(folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kdist")
    logger.addHandler(handler)
    for save_freq in (ALL_STEPS + 1, ALL_STEPS - 1, "epoch"):
        fit(folder, save_freq=save_freq)
    logger.removeHandler(handler)
    return [record.getMessage() for record in records if "no backup" in record.getMessage()]


@pytest.mark.kills(backup_never_written_without_a_warning="[jax]")
@on("jax")
def test_a_fit_without_any_backup_warns(backend: str, tmp_path: Path) -> None:
    ((warning,),) = run(backend, 1, in_worker_no_backup, str(tmp_path / "backup"))
    assert f"its {ALL_STEPS} steps are fewer than save_freq={ALL_STEPS + 1}" in warning
