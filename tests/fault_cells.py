"""The cells of the fault matrix: each starts a job, injects a fault into one worker, and checks the result."""

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
# Other cells run at the same time, and a failing worker needs time to print its traceback.
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
STEPS = 12  # in the whole job: 3 epochs of 4 steps
KINDS = {"kill": -9, "sigterm": -15, "hang": 70, "exception": 1}
FROZEN = {"freeze": -9}  # a frozen worker never ends: the test kills it after the others have ended
# The place of the fault, and a pattern of places that the other workers may report.
PLACES = {
    "begin": ("phase=begin", "the beginning of fit|the beginning of epoch 1|step 1 of epoch 1"),
    # Another worker can be a step behind: TensorFlow detects the lost worker before the step has ended.
    "step": ("step=6", "step [12] of epoch 2"),
    "validation": ("phase=validation", "validation, after step 4 of epoch 1|step 4 of epoch 1"),
    "epoch-end": ("phase=epoch-end,epoch=2", "the end, after step 4 of epoch 2|step . of epoch [23]"),
}
# Faults during a save after the second step of the second epoch. After `save-begin`, the save runs in the background,
# while training continues to the next save or to the end. Only the chief runs the last two parts.
_LATER = "step . of epoch [23]|the (beginning|end).* of epoch [23]|validation.*|the end of fit"
SAVES = {
    "save-begin": ("phase=save-begin,step=6", "step [23] of epoch 2"),
    "save-write": ("phase=save-write,step=6", _LATER),
    "save-report": ("phase=save-report,step=6", _LATER),
    "save-commit": ("phase=save-commit,step=6", _LATER),
    "save-publish": ("phase=save-publish,step=6", _LATER),
}
PLACES |= SAVES
# The workers agree before each step of a dataset, so they may wait for a message or for the step.
PLACES["dataset"] = ("step=6", "step [1-4] of epoch 2")
# A thread reads batches in advance. kdist cannot inject faults there, so the dataset itself stops the process.
PLACES["reading"] = ("step=1000", "step [1-4] of epoch 1|the beginning of (fit|epoch 1)")
IN_BACKGROUND = [*SAVES][1:]
OF_CHIEF = [*SAVES][3:]
# Strategies that do not mirror their variables like the default: their backends, their number of workers, and the code
# that creates them. The faults are a kill and, if there is another worker to detect it, a hang.
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
# At these places, the first backup may be incomplete. It starts after the second step.
BEFORE_BACKUPS = ("begin", "reading", "validation")


@dataclass
class Cell:
    """One fault of one worker."""

    backend: str
    kind: str
    place: str
    victim: int
    num_workers: int
    restarts: bool  # whether the job restarts after the fault
    is_pair: bool  # whether it is part of `make test`
    strategy: str = ""  # a key of `STRATEGIES`, or empty for the default strategy
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
        """The allowed seconds from the fault to the end of the last worker."""
        return HEARTBEAT + SLACK

    def start(self, folder: Path) -> None:
        """Starts the job. A restarted job has no fault."""
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
        self.began = time.monotonic()  # the first process of a backend waits for imports

    def has_ended(self) -> bool:
        """Returns whether all workers have ended or the time is over; kills a frozen worker after all others end."""
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
        """Raises an error unless all workers ended in time and named the failed worker."""
        victim = self.workers[self.victim]
        for index, worker in enumerate(self.workers):
            assert worker.exit_code is not None, f"worker {index} has not ended"
            assert "FINISHED" not in worker.stdout(), f"worker {index} has finished"
            with pytest.raises(ProcessLookupError):  # its child processes have also ended
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
            # No worker is lost: a save has failed, and the next save raises the error.
            # Another worker may reach the next save first. It then reports the error of the failed worker.
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
        """Restarts the job, without the fault."""
        self.is_restarted, self.workers, self.failed_at = True, [], 0.0
        self.start(folder)

    def check_restart(self, expected: list[float]) -> None:
        """Raises an error unless the job has resumed from a backup, with the weights of an uninterrupted job."""
        for index, worker in enumerate(self.workers):
            assert worker.exit_code == 0, f"worker {index} has failed after the restart"
            numpy.testing.assert_allclose(weights_of(worker), expected, rtol=1e-5, atol=1e-6)
            steps, how = said_by(worker, "STEPS").split(" ", 1)
            assert self.place in BEFORE_BACKUPS or how == "GOES ON", "there was no backup to go on from"
            assert (int(steps) < STEPS) == (how == "GOES ON"), f"{steps} steps after the restart"

    def report(self) -> str:
        """Returns the problem and the output of the workers."""
        said = "\n".join(f"{w.stdout()}\n{w.stderr()[:1500]}\n…\n{w.stderr()[-3000:]}" for w in self.workers)
        return f"{self}: {self.problem}\n{said}"


def said_by(worker: Script, word: str) -> str:
    said = re.search(rf"{word} (.*)", worker.stdout())
    assert said, f"{word} is not in: {worker.stdout()}"
    return said[1]


def weights_of(worker: Script) -> list[float]:
    return [float(word) for word in said_by(worker, "WEIGHTS").split()]


def all_cells(backend: str, now: int) -> Iterator[Cell]:
    """Yields the cells of a backend: every kind of fault × place × worker × number of workers.

    The pairs of `make test` are a sixth of the kinds × places, each on one backend. Within 18 turns, each kind runs at
    each place on each backend. The failed worker and the number of workers rotate. Per place, one job restarts.
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
