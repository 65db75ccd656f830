"""The fault matrix: whatever happens to a worker, wherever it is, the others end in time and name it; started
again, the job ends with the weights of one that was never interrupted.

No launcher looks after these workers, so each of them has to end by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field

import numpy
import pytest

from tests.processes import BACKENDS, Script, local_addresses, tf_config
from tests.zygote import Worker, Zygote

HEARTBEAT = 6.0
# Other cells run at the same time, and a worker that fails needs a moment to print its traceback.
SLACK = 12.0
AT_ONCE = 3

SCRIPT = """
strategy = kdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = numpy.random.RandomState(1).rand(16, 3).astype("float32")
backup = kdist.callbacks.BackupAndRestore(os.environ.get("BACKUP", "backup"), 2, delete_checkpoint=False)
model.set_weights([w * 0 for w in model.get_weights()])

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if "STOPS" in os.environ and index == 3:
            print("kdist: --inject by the test itself", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        rows = x[index * 4 : index * 4 + 4]
        return rows, rows[:, :1]

data = {"x": Batches()} if "DATASET" in os.environ else {"x": x, "y": x[:, :1], "batch_size": 4}
model.fit(
    **data, epochs=3, verbose=0, validation_data=(x[:4], x[:4, :1]), callbacks=[backup], shuffle=False
)
weights = numpy.concatenate([w.ravel() for w in model.get_weights()])
print("WEIGHTS", " ".join(map(str, weights)))
print("FINISHED", flush=True)
"""
KINDS = {"kill": -9, "sigterm": -15, "hang": 70, "exception": 1}
FROZEN = {"freeze": -9}  # it never ends by itself: the test kills it once the others have ended
# Where the fault is, and where the others may be by then. Validation of the first epoch, the end of the second.
PLACES = {
    "begin": ("phase=begin", "the beginning of fit|the beginning of epoch 1|step 1 of epoch 1"),
    "step": ("step=6", "step 2 of epoch 2"),
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


@dataclass
class Cell:
    """One fault of one worker."""

    kind: str
    place: str
    victim: int
    num_workers: int = 2
    workers: list[Worker] = field(default_factory=list)
    began: float = 0.0
    failed_at: float = 0.0
    ended_after: float = 0.0
    is_restarted: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.place}-{self.victim}-of-{self.num_workers}"

    @property
    def limit(self):
        """Seconds from the fault to the end of the last worker."""
        return HEARTBEAT + SLACK

    def start(self, zygote):
        fault = "" if self.is_restarted else f"{self.kind}:worker={self.victim},{PLACES[self.place][0]}"
        self.addresses = local_addresses(self.num_workers)
        self.began = time.monotonic()
        for index in range(self.num_workers):
            env = {
                "TF_CONFIG": tf_config(self.addresses, index),
                "KDIST_INJECT": fault,
                "BACKUP": str(zygote.folder / f"{self.name}-backup"),
                "KDIST_HEARTBEAT_TIMEOUT": f"{HEARTBEAT:g}",
                "KDIST_JOIN_TIMEOUT": "60",
            }
            if self.place in ("dataset", "reading"):
                env["DATASET"] = "1"
            if self.place == "reading" and index == self.victim and not self.is_restarted:
                env["STOPS"] = "1"
            attempt = "again" if self.is_restarted else "first"
            self.workers.append(zygote.start(f"{self.name}-{attempt}-worker{index}", env))

    def has_ended(self):
        now = time.monotonic()
        if not self.failed_at and "kdist: --inject" in self.workers[self.victim].stderr():
            self.failed_at = now
        victim = self.workers[self.victim]
        if self.is_restarted:
            return all(worker.exit_code is not None for worker in self.workers) or now > self.began + 60
        if all(worker.exit_code is not None for worker in self.workers if worker is not victim):
            if victim.exit_code is None and self.kind in FROZEN:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(victim.pid, signal.SIGKILL)
            if victim.exit_code is not None:
                return True
        if self.failed_at:
            return now > self.failed_at + self.limit + SLACK
        return now > self.began + 90

    def seconds(self):
        victim = self.workers[self.victim]
        return max(w.ended_at for w in self.workers if w is not victim) - self.failed_at

    def check(self):
        """Raises unless everything is as promised."""
        victim = self.workers[self.victim]
        for index, worker in enumerate(self.workers):
            assert worker.exit_code is not None, f"worker {index} has not ended"
            assert "FINISHED" not in worker.stdout(), f"worker {index} has finished"
            with pytest.raises(ProcessLookupError):  # nor has anybody that it has started
                os.killpg(worker.pid, 0)
        assert victim.exit_code == (KINDS | FROZEN)[self.kind], f"exit code {victim.exit_code}"
        self.ended_after = self.seconds()
        assert self.ended_after < self.limit, f"{self.ended_after:.1f} s"
        if self.kind == "hang":
            said = f"worker {self.victim} ({self.addresses[self.victim]}) has hung"
            assert said in victim.stderr() and "in _fail" in victim.stderr(), "no stack of the hung worker"
        for worker in self.workers:
            if worker is not victim:
                self._check_survivor(worker)

    def _check_survivor(self, worker):
        text = worker.stderr()
        assert worker.exit_code not in (0, None)
        if self.place in IN_BACKGROUND and self.kind in ("exception", "hang") and "CheckpointError" in text:
            # Nobody is lost: a save has failed, which is told at the next one.
            assert re.search(rf"worker {self.victim}\b", text), "does not name the worker"
            return
        named = f"The job cannot go on without worker {self.victim} ({self.addresses[self.victim]}), which"
        assert named in text, "does not name the worker"
        where = re.search(r"Missing from [\w ]+ at ([\w ,]+)\.", text)
        assert where, "does not say where"
        assert re.fullmatch(PLACES[self.place][1], where[1]), f"is at {where[1]}"
        assert "Traceback (most recent call last)" in text or "this worker was here" in text, "no stack"

    def restart(self, zygote):
        """Starts the job again, without the fault."""
        self.is_restarted, self.workers, self.failed_at = True, [], 0.0
        self.start(zygote)

    def check_restart(self, expected):
        """Raises unless it has gone on as if nothing had happened."""
        for index, worker in enumerate(self.workers):
            assert worker.exit_code == 0, f"worker {index} has failed after the restart"
            numpy.testing.assert_allclose(weights_of(worker), expected, rtol=1e-5, atol=1e-6)


def weights_of(worker):
    line = next(line for line in worker.stdout().splitlines() if line.startswith("WEIGHTS"))
    return [float(word) for word in line.split()[1:]]


def uninterrupted(zygote, num_workers):
    """The weights of a job that nothing happens to."""
    cell = Cell("none", "begin", 0, num_workers, is_restarted=True)
    cell.start(zygote)
    deadline = time.monotonic() + 90
    while any(worker.exit_code is None for worker in cell.workers):
        assert time.monotonic() < deadline, "\n".join(worker.stderr() for worker in cell.workers)
        time.sleep(0.05)
    assert cell.workers[0].exit_code == 0, cell.workers[0].stderr()
    return weights_of(cell.workers[0])


def run_all(cells, zygote, restarts):
    """Runs cells, a few at a time: each until all have ended, and then, where wanted, again from its backup."""
    expected = uninterrupted(zygote, 2)
    waiting, running = list(cells), []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop(0))
            running[-1].start(zygote)
        for cell in [cell for cell in running if cell.has_ended()]:
            try:
                if not cell.is_restarted:
                    cell.check()
                    if restarts(cell):
                        cell.restart(zygote)
                        continue
                else:
                    cell.check_restart(expected)
            except AssertionError as error:
                cell.problem = str(error).strip().splitlines()[0]
            running.remove(cell)
        time.sleep(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_launcher_starts_again_after_a_hang(backend, tmp_path):
    options = ("--max-restarts", "1", "--heartbeat-timeout", "4", "--inject", "hang:worker=1,step=6")
    command = (sys.executable, "-m", "kdist", "run", "-n", "2", "--backend", backend, *options)
    job = Script(tmp_path, "train", f"import os, signal, sys, keras, numpy, kdist\n{SCRIPT}", {}, command)
    try:
        assert job.wait(90) == 0, job.stderr()
        assert re.search(
            r"──── kdist: worker 1 \([\d.:]+\) failed first: it ended with exit code 70", job.stderr()
        )
        assert (
            "kdist: restart 1 of 1 because worker 1 ended with exit code 70; starting 2 workers."
            in job.stderr()
        )
        assert job.stdout().count("FINISHED") == 2
    finally:
        job.kill()


def matrix(backend, cells):
    """The matrix in text: how many seconds after the fault the last worker had ended."""
    rows = sorted({(cell.kind, cell.num_workers, cell.victim) for cell in cells})
    lines = [f"{backend:30}" + "".join(f"{place:>12}" for place in PLACES)]
    for kind, number, victim in rows:
        found = {c.place: c for c in cells if (c.kind, c.num_workers, c.victim) == (kind, number, victim)}
        shown = [
            "" if p not in found else "FAIL" if found[p].problem else f"{found[p].ended_after:.1f} s"
            for p in PLACES
        ]
        lines.append(f"{f'{kind} of worker {victim} of {number}':30}" + "".join(f"{s:>12}" for s in shown))
    return "\n".join(lines)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whatever_happens_the_others_end_and_name_the_worker(backend, tmp_path, capsys):
    cells = [Cell(*cell) for cell in itertools.product(KINDS, PLACES, (0, 1), (2, 3)) if cell[1] != "reading"]
    cells = [cell for cell in cells if cell.victim == 0 or cell.place not in OF_CHIEF]
    cells += [Cell("freeze", place, victim) for place in ("step", "dataset", "reading") for victim in (0, 1)]
    zygote = Zygote(tmp_path, backend, SCRIPT)
    began = time.monotonic()
    try:
        # What is on disk hardly depends on how many have written it, and these restarts take seconds of computing each.
        all_restarts = backend == "torch" or "KDIST_FULL_MATRIX" in os.environ
        run_all(cells, zygote, lambda cell: cell.num_workers == 2 or all_restarts)
    finally:
        zygote.close()
    with capsys.disabled():
        print(
            f"\n{matrix(backend, cells)}\n{len(cells)} cells in {time.monotonic() - began:.0f} s", flush=True
        )
    failed = [cell for cell in cells if cell.problem]
    assert not failed, "\n".join(
        f"{cell.name}: {cell.problem}\n"
        + "\n".join(f"{w.stdout()}\n{w.stderr()[:1500]}\n…\n{w.stderr()[-3000:]}" for w in cell.workers)
        for cell in failed[:3]
    )
