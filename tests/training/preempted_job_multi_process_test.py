"""A preempted worker's job saves at the same step on all workers, restarts, and loses nothing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.scripts import RUN, Script

EPOCHS = 12
SLOW = 0.05  # seconds per step, so that the workers agree before the last step

SCRIPT = f"""
import os, time
import keras, kdist
from tests.helpers import by_hand

who = os.environ["KDIST_RESTART"] + " " + os.environ["RANK"]

class Steps(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        print("STEP", who, self.epoch * by_hand.STEPS + batch, time.monotonic(), flush=True)

strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    # The second start begins elsewhere: what it ends with is what was restored.
    model = by_hand.model(is_true=who[0] == "0")
backup = kdist.callbacks.BackupAndRestore("backup", save_freq=None, save_before_preemption=True)
by_hand.fit(model, {EPOCHS}, Steps(), backup)
print(by_hand.show(model), flush=True)
"""


def steps_of(output: str, start: int, rank: int) -> list[tuple[int, float]]:
    """Returns the steps of a worker in one start of the job, with their times."""
    found = re.findall(rf"STEP {start} {rank} (\d+) ([\d.]+)", output)
    return [(int(number), float(at)) for number, at in found]


@pytest.mark.in_turn(4)
def test_a_worker_is_taken_away_and_nothing_is_lost(tmp_path: Path) -> None:
    options = ("-n", "2", "--backend", "torch", "--max-restarts", "1", "--grace-period", "60")
    faults = ("--inject", "sigterm:worker=1,step=6", "--inject", f"slow:worker=0,seconds={SLOW},always=1")
    job = Script(tmp_path, "train", SCRIPT, {}, (*RUN, *options, *faults)).finish(240)
    out, err = job.stdout(), job.stderr()
    first, second = ([[n for n, _ in steps_of(out, start, rank)] for rank in (0, 1)] for start in (0, 1))
    assert first[0] == first[1], "all workers leave after the same step"
    assert 5 <= len(first[0]) < EPOCHS * by_hand.STEPS
    assert second[0] == second[1]
    assert first[0] + second[0] == list(range(EPOCHS * by_hand.STEPS)), "each step is taken once"
    for found in (weights := by_hand.shown(out)):
        np.testing.assert_allclose(found, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
    assert len(weights) == 2, "the first start has not come to its end"
    assert re.search(r"restart 1 \(not counted\) because worker [01] was preempted .*75", err), err
    assert not (tmp_path / "backup").exists(), "it is deleted once it is not needed any more"
    check_slow_steps(out, err)


def check_slow_steps(out: str, err: str) -> None:
    """One worker is slow at every step of every start, but the earlier fault is not repeated."""
    assert err.count("[worker 1] kdist: --inject sigterm") == 1, (
        err
    )  # the launcher repeats it without a prefix
    for start in (0, 1):
        numbers, times = zip(*steps_of(out, start, 0), strict=True)
        assert np.diff(times).min() >= SLOW, f"start {start}"
        said = re.findall(
            r"worker 0\] kdist: --inject slow:worker=0,seconds=0\.05,always=1 takes effect at step (\d)", err
        )
        assert len(said) == EPOCHS * by_hand.STEPS, numbers
