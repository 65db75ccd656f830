"""Traces, `Throughput` and `RunLog` measure a `fit` on two workers, one of which is slow."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdist.measuring.records import read_run
from kdist.tracing import merging
from kdist.tracing.pace import alone
from tests.helpers.models import network
from tests.helpers.processes import BACKENDS, each_backend, run, strategy
from tests.helpers.scripts import Script

ROWS, BATCH, EPOCHS = 44, 8, 3  # a last batch of 4 rows; 6 steps per epoch
SLOW = 0.1  # seconds per step that the second worker is busy otherwise


def in_worker_measured(folder: str) -> dict[str, Any]:
    """Runs a `fit` with every kind of measurement."""
    import time

    import keras

    import kdist
    from kdist.tracing import spans
    from kdist.tracing.trace_file import TraceFile

    rank = strategy().runtime.worker_index

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(SLOW * rank)

    x = np.random.RandomState(0).rand(ROWS, 3).astype("float32")
    model = network(1, scope=strategy().scope())
    trace = TraceFile(folder, rank)
    spans.add_sink(trace)
    csv = keras.callbacks.CSVLogger(f"{folder}/log.csv")
    measures = [kdist.callbacks.Throughput(), kdist.callbacks.RunLog(folder, every=4)]
    history = model.fit(
        x,
        x[:, :1],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x, x[:, :1]),
        callbacks=[*measures, csv, Slow()],
    ).history
    trace.close()
    assert not spans._sinks, "what has measured has ended"
    return history


@pytest.mark.kills(measured_rows_of_each_worker="[torch]")
@each_backend
def test_a_fit_is_measured_alike_on_all_workers(backend: str, tmp_path: Path) -> None:
    history, other = run(backend, 2, in_worker_measured, str(tmp_path))
    assert history == other
    # On a busy machine, the other worker may be slower at times, but hardly in every epoch.
    assert 1 in history["slowest_worker"] and set(history["slowest_worker"]) <= {0, 1}
    # Each batch of 8 rows waits 0.1 s for the slow worker. Validation rows and replicas must not count again.
    assert all(0 < speed < BATCH / SLOW for speed in history["rows_per_second"]), history["rows_per_second"]
    for name in ("waiting_for_input", "waiting_for_others"):
        assert all(0 <= share < 1 for share in history[name]), name
    assert max(history["waiting_for_others"]) > 0
    assert {"slowest_worker", "val_loss"} <= set(
        (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    )
    check_records(tmp_path, history)
    for worker in (0, 1):
        check_trace(json.loads((tmp_path / f"worker-{worker}.json").read_text()), backend)


def check_records(folder: Path, history: dict[str, Any]) -> None:
    run = read_run(str(folder))
    assert [log.worker for log in run.workers] == [0, 1]
    assert run.positions() == {1: 0, 2: 6, 3: 12}
    for log in run.workers:
        places = [(epoch, *place) for epoch in (1, 2, 3) for place in ((4, False), (6, True))]
        assert [record.place for record in log.records] == places
        assert log.totals.steps == EPOCHS * 6 - 1, "all but the one that compiles"
        assert log.totals.rows == EPOCHS * ROWS - BATCH
        assert log.totals.training <= log.totals.elapsed
        ends = [record.logs for record in log.records if record.ends_epoch]
        assert [logs["val_loss"] for logs in ends] == history["val_loss"]
    slow = run.workers[1].totals
    assert alone(slow, run.exchanges_in_programs) >= SLOW * (EPOCHS * 6 - 1), "no sleep is taken for waiting"


def check_trace(events: list[dict[str, Any]], backend: str) -> None:
    spans = [event for event in events if event["ph"] == "X"]
    count = Counter(event["name"] for event in spans)
    fused = "" if backend == "torch" else ", exchange inside"
    assert count[f"step{fused}"] + count[f"first step{fused}"] == EPOCHS * 6
    assert count[f"first step{fused}"] == count["fit"] == 1
    assert count["epoch"] == count["validation"] == EPOCHS
    assert count["waiting for input"] >= 2 * EPOCHS * 6
    assert count["an exchange of messages"] >= EPOCHS
    assert (count["all_reduce"] >= EPOCHS * 6) == (backend == "torch"), (
        "the others exchange in their programs"
    )
    assert sum(event["args"]["rows"] for event in spans if "rows" in event.get("args", ())) == EPOCHS * ROWS
    for thread in {event["tid"] for event in spans}:  # spans are consecutive or nested
        stack: list[float] = []
        row = [event for event in spans if event["tid"] == thread]
        for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
            while stack and event["ts"] >= stack[-1] - 1:
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 1, event
            stack.append(event["ts"] + event["dur"])


def in_worker_one_sided() -> str:

    import kdist

    model = network(1, scope=strategy().scope())
    x = np.ones((8, 3), "float32")
    callbacks = [kdist.callbacks.Throughput()] if strategy().runtime.worker_index == 1 else []
    with pytest.raises(kdist.errors.KdistError) as caught:
        model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS[-1:])
def test_a_worker_that_lacks_the_callback_hangs_nobody(backend: str) -> None:
    for said in run(backend, 2, in_worker_one_sided):
        assert "they differ in callbacks that all workers need" in said


KILLED = """
import os, signal, time
import keras, numpy, kdist
with kdist.MirroredStrategy(["cpu:0"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = numpy.random.RandomState(0).rand(40, 3).astype("float32")

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not os.path.exists("killed"):
            time.sleep(0.1)  # a trace lacks the last moment: not all steps may be in it

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            while not any(name.startswith("ckpt-") for name in os.listdir("backup")):
                time.sleep(0.01)  # it is written in the background
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [kdist.callbacks.BackupAndRestore("backup", save_freq=5), kdist.callbacks.RunLog("run", every=2), Kill()]
model.fit(x, x[:, :1], batch_size=10, epochs=3, verbose=0, callbacks=callbacks)
"""


@pytest.mark.parametrize("backend", BACKENDS[1:2])
def test_a_worker_that_is_killed_leaves_what_can_be_read_and_goes_on(backend: str, tmp_path: Path) -> None:
    env = {"KERAS_BACKEND": backend, "KDIST_TRACE": str(tmp_path / "trace")}
    for name, code in (("killed", -signal.SIGKILL), ("again", 0)):
        Script(tmp_path, name, KILLED, env).finish(code=code)
        if code:
            with contextlib.suppress(OSError), open(tmp_path / "run" / "worker-0.jsonl", "a") as torn:
                torn.write('{"epoch": 2, "st')
    names = [Path(path).name for path in merging.files_in(str(tmp_path / "trace"))]
    assert names == ["worker-0.json", "worker-0-2.json"]
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())
    steps = Counter(event["pid"] for event in events if event.get("args", {}).get("rows"))
    assert 4 <= steps[0] <= 8, "but for the last moment, all that it did"
    assert steps[10_000] == 7, "the backup is of step 5 of 12"
    assert {"writing a shard", "beginning a save", "committing a checkpoint"} <= {e["name"] for e in events}
    (log,) = read_run(str(tmp_path / "run")).workers
    assert len(log.starts) == 2
    places = [record.place for record in log.records]
    assert places == sorted(set(places)) and {epoch for epoch, _, _ in places} == {1, 2, 3}
    assert sum(record.totals.steps for record in log.records) >= 10


def in_worker_resumed(folder: str) -> None:
    """Fails after all steps of the first epoch are in the backup; a second `fit` resumes there."""
    import os
    import time

    import keras

    import kdist
    from kdist.errors import InvalidArgumentError
    from kdist.tracing import spans

    with pytest.raises(InvalidArgumentError, match="in an object store"):
        kdist.callbacks.RunLog("gs://bucket/run")

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["phase"], logs["learning_rate"] = "warm-up", float("inf")

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            while not any(name.startswith("ckpt-") for name in os.listdir(f"{folder}/backup")):
                time.sleep(0.01)  # a background thread writes it
            raise RuntimeError("the disk is full")

    x = np.random.RandomState(0).rand(32, 3).astype("float32")
    for failing in ([Fail()], []):
        model = network(1, scope=strategy().scope())
        backup = kdist.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=4)
        log = kdist.callbacks.RunLog(folder, every=2)
        with pytest.raises(RuntimeError) if failing else contextlib.nullcontext():
            measures = [Tell(), backup, kdist.callbacks.Throughput(), log]
            model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=measures + failing)
        assert not spans._sinks, "what has measured has ended"
        assert log._file is None


@pytest.mark.kills("failed_fit_measures_on", "records_of_a_resumed_epoch_lost")
@pytest.mark.parametrize("backend", BACKENDS[2:])
def test_an_epoch_of_which_all_steps_were_taken_keeps_its_records(backend: str, tmp_path: Path) -> None:
    run(backend, 1, in_worker_resumed, str(tmp_path))
    (log,) = read_run(str(tmp_path)).workers
    places = [(epoch, *place) for epoch in (1, 2) for place in ((2, False), (4, False), (4, True))]
    assert [record.place for record in log.records] == places
    assert sum(record.totals.steps for record in log.records) == 2 * 3, "but for the one that compiles"
    last = log.records[-1].logs
    assert (last["phase"], last["learning_rate"]) == ("warm-up", None), "JSON has no infinity"
