"""The cells of the fault matrix: a job of some workers, a fault of one of them, and what must hold afterwards."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest

from tests.helpers.processes import BACKENDS
from tests.helpers.scripts import Script, local_addresses, tf_config
from tests.turn import turn

HEARTBEAT = 6.0
# Other cells run at the same time, and a worker that fails needs a moment to print its traceback.
SLACK = 12.0

SCRIPT = """
import os, signal, sys
import keras, numpy, kdist

folder = os.environ.get("BACKUP", "backup")
goes_on = os.path.isdir(folder) and any(name.startswith("ckpt-") for name in os.listdir(folder))
strategy = eval(os.environ.get("STRATEGY", "kdist.MultiWorkerMirroredStrategy()"))
with strategy.scope():
    # Where a backup is, other weights are in its way: a job that does not restore it ends elsewhere.
    begin = keras.initializers.RandomNormal(seed=2 if goes_on else 1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer=begin)])
    model.compile("adam", "mse")
x = numpy.random.RandomState(1).rand(16, 4).astype("float32")
backup = kdist.callbacks.BackupAndRestore(folder, 2, delete_checkpoint=False)

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if "STOPS" in os.environ and index == 3:
            print("kdist: --inject by the test itself", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        rows = x[index * 4 : index * 4 + 4]
        return rows, rows[:, :1]

class Counts(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

counts = Counts()
data = {"x": Batches()} if "DATASET" in os.environ else {"x": x, "y": x[:, :1], "batch_size": 4}
model.fit(
    **data, epochs=3, verbose=0, validation_data=(x[:4], x[:4, :1]), callbacks=[backup, counts], shuffle=False
)
weights = numpy.concatenate([w.ravel() for w in model.get_weights()])
print("WEIGHTS", " ".join(map(str, weights)))
print("STEPS", counts.steps, "GOES ON" if goes_on else "BEGINS")
print("FINISHED", flush=True)
"""
STEPS = 12  # of the whole job, 4 an epoch
KINDS = {"kill": -9, "sigterm": -15, "hang": 70, "exception": 1}
FROZEN = {"freeze": -9}  # it never ends by itself: the test kills it once the others have ended
# Where the fault is, and where the others may be by then. Validation of the first epoch, the end of the second.
PLACES = {
    "begin": ("phase=begin", "the beginning of fit|the beginning of epoch 1|step 1 of epoch 1"),
    # A survivor can be a step behind: on TensorFlow it learns of the loss before its own step has ended.
    "step": ("step=6", "step [12] of epoch 2"),
    "validation": ("phase=validation", "validation, after step 4 of epoch 1|step 4 of epoch 1"),
    "epoch-end": ("phase=epoch-end,epoch=2", "the end, after step 4 of epoch 2|step . of epoch [23]"),
}
# A save after the second step of the second epoch; what comes after its beginning is done in the background, while
# training goes on to the next save or to the end. The last two are the chief's.
_LATER = "step . of epoch [23]|the (beginning|end).* of epoch [23]|validation.*|the end of fit"
SAVES = {
    "save-begin": ("phase=save-begin,step=6", "step [23] of epoch 2"),
    "save-write": ("phase=save-write,step=6", _LATER),
    "save-report": ("phase=save-report,step=6", _LATER),
    "save-commit": ("phase=save-commit,step=6", _LATER),
    "save-publish": ("phase=save-publish,step=6", _LATER),
}
PLACES |= SAVES
# A pipeline, in whose steps the workers agree: they may wait for a message, or for the step.
PLACES["dataset"] = ("step=6", "step [1-4] of epoch 2")
# A thread reads ahead, in which no fault can be injected: the dataset itself stops the process.
PLACES["reading"] = ("step=1000", "step [1-4] of epoch 1|the beginning of (fit|epoch 1)")
IN_BACKGROUND = [*SAVES][1:]
OF_CHIEF = [*SAVES][3:]
# Strategies that hold their variables in another way: on which backends, with how many workers, and how a job makes
# them. They meet a kill and, where there is somebody to notice, a hang.
STRATEGIES = {
    "central": (BACKENDS, 1, 'kdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])'),
    "divided": (("jax", "torch"), 2, "kdist.FullyShardedStrategy(min_size=2)"),
    "parallel": (
        ("jax", "torch"),
        2,
        'kdist.ModelParallelStrategy({".*kernel": ("model", None)}, mesh={"batch": 1, "model": 2})',
    ),
    "tpu": (
        ("jax",),
        2,
        'kdist.TPUStrategy(kdist.cluster_resolver.TFConfigClusterResolver(), devices=["cpu:0"])',
    ),
    "keras": (
        ("torch",),
        2,
        'kdist.KerasDistributionStrategy(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))',
    ),
}
# There the first backup, made after the second step, may not be complete yet.
BEFORE_BACKUPS = ("begin", "reading", "validation")


@dataclass
class Cell:
    """One fault of one worker."""

    backend: str
    kind: str
    place: str
    victim: int
    num_workers: int
    restarts: bool  # whether the job is started again after it
    is_pair: bool  # whether it is part of `make test`
    strategy: str = ""  # a key of `STRATEGIES`, or nothing for the usual one
    workers: list[Script] = field(default_factory=list, repr=False)
    began: float = 0.0
    failed_at: float = 0.0
    ended_after: float = 0.0
    is_restarted: bool = False
    problem: str = ""
    done: threading.Event = field(default_factory=threading.Event, repr=False)

    def __str__(self) -> str:
        strategy = f"{self.strategy}-" if self.strategy else ""
        return f"{self.backend}-{strategy}{self.kind}-{self.place}-{self.victim}-of-{self.num_workers}"

    @property
    def limit(self) -> float:
        """Seconds from the fault to the end of the last worker."""
        return HEARTBEAT + SLACK

    def start(self, folder: Path) -> None:
        """Starts the job; the second time without the fault."""
        fault = "" if self.is_restarted else f"{self.kind}:worker={self.victim},{PLACES[self.place][0]}"
        self.addresses = local_addresses(self.num_workers)
        attempt = "again" if self.is_restarted else "first"
        for index in range(self.num_workers):
            env = {
                "KERAS_BACKEND": self.backend,
                "TF_CONFIG": tf_config(self.addresses, index),
                "KDIST_INJECT": fault,
                "BACKUP": str(folder / f"{self}-backup"),
                "KDIST_HEARTBEAT_TIMEOUT": f"{HEARTBEAT:g}",
                "KDIST_HANG_TIMEOUT": f"{0.7 * HEARTBEAT:g}",
                "KDIST_JOIN_TIMEOUT": "60",
            }
            if self.strategy:
                env["STRATEGY"] = STRATEGIES[self.strategy][2]
            if self.place in ("dataset", "reading"):
                env["DATASET"] = "1"
            if self.place == "reading" and index == self.victim and not self.is_restarted:
                env["STOPS"] = "1"
            self.workers.append(Script(folder, f"{self}-{attempt}-worker{index}", SCRIPT, env))
        self.began = time.monotonic()  # the first process of a backend waits for its imports

    def has_ended(self) -> bool:
        """Whether all have ended, or should have; a frozen worker is killed when all others have."""
        now = time.monotonic()
        victim = self.workers[self.victim]
        if not self.failed_at and "kdist: --inject" in victim.stderr():
            self.failed_at = now
        if self.is_restarted:
            return all(worker.exit_code is not None for worker in self.workers) or now > self.began + 60
        if all(worker.exit_code is not None for worker in self.workers if worker is not victim):
            if self.kind in FROZEN:
                victim.process.kill()
            if victim.exit_code is not None:
                return True
        if self.failed_at:
            return now > self.failed_at + self.limit + SLACK
        return now > self.began + 90

    def check(self) -> None:
        """Raises unless everything is as promised."""
        victim = self.workers[self.victim]
        for index, worker in enumerate(self.workers):
            assert worker.exit_code is not None, f"worker {index} has not ended"
            assert "FINISHED" not in worker.stdout(), f"worker {index} has finished"
            with pytest.raises(ProcessLookupError):  # nor has anybody that it has started
                os.killpg(worker.process.pid, 0)
        assert victim.exit_code == (KINDS | FROZEN)[self.kind], f"exit code {victim.exit_code}"
        others = [worker.ended_at for worker in self.workers if worker is not victim]
        self.ended_after = max(others, default=self.failed_at) - self.failed_at
        assert self.ended_after < self.limit, f"{self.ended_after:.1f} s"
        if self.kind == "hang":
            said = f"worker {self.victim} ({self.addresses[self.victim]}) hung: "
            assert said in victim.stderr() and "in _fail" in victim.stderr(), "no stack of the hung worker"
        for worker in self.workers:
            if worker is not victim:
                self._check_survivor(worker)

    def _check_survivor(self, worker: Script) -> None:
        text = worker.stderr()
        assert worker.exit_code not in (0, None)
        if self.place in IN_BACKGROUND and self.kind in ("exception", "hang") and "CheckpointError" in text:
            # Nobody is lost: a save has failed, which is told at the next one.
            # Another worker may be the first to meet that next save, and then passes on what it was told.
            lost = rf"Worker {self.victim} (could|did) not write its shard"
            told = rf"Worker {self.victim} (could not write a|cannot save the) checkpoint: "
            assert re.search(f"CheckpointError: .*({lost}|{told})", text), "does not say whose save failed"
            assert self.kind == "hang" or "injected by --inject" in text, "does not say why it failed"
            return
        named = f"The job lost worker {self.victim} ({self.addresses[self.victim]}): it"
        assert named in text, "does not name the worker"
        where = re.search(r"needs (?:it|them) for [\w ]+ at ([\w ,]+)\.", text)
        assert where, "does not say where"
        assert re.fullmatch(PLACES[self.place][1], where[1]), f"is at {where[1]}"
        assert "Traceback (most recent call last)" in text or "stack trace of this worker" in text, "no stack"

    def restart(self, folder: Path) -> None:
        """Starts the job again, without the fault."""
        self.is_restarted, self.workers, self.failed_at = True, [], 0.0
        self.start(folder)

    def check_restart(self, expected: list[float]) -> None:
        """Raises unless it has gone on, from a backup, as if nothing had happened."""
        for index, worker in enumerate(self.workers):
            assert worker.exit_code == 0, f"worker {index} has failed after the restart"
            numpy.testing.assert_allclose(weights_of(worker), expected, rtol=1e-5, atol=1e-6)
            steps, how = said_by(worker, "STEPS").split(" ", 1)
            assert self.place in BEFORE_BACKUPS or how == "GOES ON", "there was no backup to go on from"
            assert (int(steps) < STEPS) == (how == "GOES ON"), f"{steps} steps after the restart"

    def report(self) -> str:
        """What went wrong, and what the workers printed."""
        said = "\n".join(f"{w.stdout()}\n{w.stderr()[:1500]}\n…\n{w.stderr()[-3000:]}" for w in self.workers)
        return f"{self}: {self.problem}\n{said}"


def said_by(worker: Script, word: str) -> str:
    said = re.search(rf"{word} (.*)", worker.stdout())
    assert said, f"{word} is not in: {worker.stdout()}"
    return said[1]


def weights_of(worker: Script) -> list[float]:
    return [float(word) for word in said_by(worker, "WEIGHTS").split()]


def all_cells(backend: str, now: int) -> Iterator[Cell]:
    """The cells of a backend: every kind of fault × place × worker × number of workers.

    Pairs (`make test`) are a sixth of the kinds × places, each on one backend. Within 18 turns, each kind meets each
    place on each backend. Which worker it is, and of how many, goes round. Per place, one job is started again.
    """
    offset = BACKENDS.index(backend)
    for p, place in enumerate(PLACES):
        kinds = (
            [*FROZEN] if place == "reading" else [*KINDS, *(FROZEN if place in ("step", "dataset") else ())]
        )
        here = [
            kind
            for k, kind in enumerate(kinds)
            if (k + p + now) % len(BACKENDS) == offset and (k + p + now // len(BACKENDS)) % 6 == 0
        ]
        again = here[(p + offset) % len(here)] if here else ""
        for k, kind in enumerate(kinds):
            victims = (0,) if place in OF_CHIEF else (0, 1)
            options = list(itertools.product(victims, (2,) if kind in FROZEN else (2, 3)))
            for option in options:
                is_pair = kind in here and option == options[(k + p + offset + now // 18) % len(options)]
                restarts = is_pair and kind == again and (p + now) % len(BACKENDS) == offset
                yield Cell(backend, kind, place, *option, restarts=restarts, is_pair=is_pair)
    for strategy, (backends, num_workers, _) in STRATEGIES.items():
        for k, kind in enumerate(("kill", "hang")[:num_workers] if backend in backends else ()):
            is_pair = (k + now) % (2 * len(BACKENDS)) == offset
            yield Cell(backend, kind, "step", k, num_workers, True, is_pair, strategy)


CELLS = [cell for backend in BACKENDS for cell in all_cells(backend, turn())]
