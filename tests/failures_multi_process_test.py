"""A worker is killed in the middle of `fit`: the other workers end soon, and their errors name the lost worker."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time

import pytest

from tests.helpers.alive import identity_of, left_of
from tests.helpers.processes import BACKENDS, full_unless
from tests.helpers.scripts import RUN, TRAINS, Script, environments_of, local_addresses, started

# The promised seconds until a job ends: with the launcher, without it, and after SIGSTOP of a worker.
LAUNCHED, ALONE, STOPPED = 1.0, 15.0, 5.0
# Additional seconds for a machine that is busy with other tests. The tests print the measured times.
SLACK = 5.0


def report(capsys, text):
    with capsys.disabled():
        print(f"\n{text}", flush=True)


@pytest.mark.parametrize(
    ("backend", "victim"),
    [
        # All backends use the same launcher, and its workers are not forked.
        pytest.param(backend, victim, marks=full_unless(victim == (backend == "jax")))
        for backend, victim in itertools.product(BACKENDS, (0, 1))
    ],
)
@pytest.mark.in_turn(6)
def test_a_launched_job_ends_at_once(backend, victim, tmp_path, capsys):
    command = (*RUN, "--num-workers", "2", "--backend", backend)
    with Script(tmp_path, "train", TRAINS, {"STEP_SECONDS": "0.01"}, command) as job:
        for rank in (0, 1):
            job.wait_for(f"TRAINS {rank} ")
        pids = {int(rank): int(pid) for rank, pid in re.findall(r"TRAINS (\d) (\d+)", job.stdout())}
        workers = [identity_of(pid) for pid in pids.values()]
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        code = job.wait(60)
        seconds = time.monotonic() - killed
        report(capsys, f"{backend}: launched job ended {seconds:.2f} s after SIGKILL of worker {victim}")
        assert code == 137
        lines = job.stderr().splitlines()
        first = next(i for i, line in enumerate(lines) if "──── kdist:" in line)
        said = rf"worker {victim} \([\d.:]+\) failed first: it was killed by SIGKILL"
        assert re.search(said, lines[first]), "\n".join(lines[first:])
        assert len(lines) - first <= 20 and "FINISHED" not in job.stdout()
        assert seconds < LAUNCHED + SLACK
        assert len(workers) == 2 and left_of(workers) == []


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "other"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_without_the_launcher_the_survivor_names_the_lost_worker(backend, victim, tmp_path, capsys):
    addresses = local_addresses(2)
    with started(tmp_path, TRAINS, environments_of(backend, addresses, STEP_SECONDS="0.01")) as scripts:
        for index, script in enumerate(scripts):
            script.wait_for(f"TRAINS {index} ")
        survivor = scripts[1 - victim]
        killed = time.monotonic()
        scripts[victim].process.kill()
        scripts[victim].wait(10)
        code = survivor.wait(60)
        seconds = time.monotonic() - killed
        report(
            capsys, f"{backend}: survivor ended {seconds:.1f} s after SIGKILL of worker {victim}, code {code}"
        )
        assert code != 0 and "FINISHED" not in survivor.stdout()
        # Raised in user code, or printed by kdist if the framework terminates the process from C++.
        expected = f"The job lost worker {victim} ({addresses[victim]})"
        assert expected in survivor.stderr(), survivor.stderr()
        assert seconds < ALONE + SLACK


# Without a callback with batch hooks, the workers exchange no messages during the steps.
STEPS = """
import os
import numpy as np
import kdist, keras

options = kdist.experimental.CommunicationOptions(implementation=os.environ["SUMS"])
strategy = kdist.MultiWorkerMirroredStrategy(communication_options=options)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.RandomState(0).rand(400_000, 3)
model.fit(x[:400], x[:400, :1], batch_size=4, verbose=0)
print("TRAINS", flush=True)
model.fit(x, x[:, :1], batch_size=4, verbose=0)
"""


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "other"])
@pytest.mark.parametrize("sums", ["AUTO", "RING"])  # in shared memory, and in the collectives of the backend
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(12)
@pytest.mark.kills("jax_waits_for_stopped_workers", "tf_waits_for_stopped_workers")
def test_all_backends_notice_a_stopped_worker_at_the_same_time(backend, sums, victim, tmp_path, capsys):
    addresses = local_addresses(2)
    with started(tmp_path, STEPS, environments_of(backend, addresses, SUMS=sums)) as scripts:
        for script in scripts:
            script.wait_for("TRAINS")
        time.sleep(1)
        survivor = scripts[1 - victim]
        began = time.monotonic()
        os.kill(scripts[victim].process.pid, signal.SIGSTOP)
        while f"The job lost worker {victim} ({addresses[victim]})" not in survivor.stderr():
            assert survivor.exit_code is None and time.monotonic() - began < 60, survivor.output()
            time.sleep(0.05)
        seconds = time.monotonic() - began
        code = survivor.wait(60)
        report(
            capsys,
            f"{backend}, {sums}: noticed {seconds:.1f} s after SIGSTOP of worker {victim}, code {code}",
        )
        assert code != 0
        assert seconds < STOPPED + SLACK


FAILS = TRAINS.replace(
    "# and then",
    """
            if strategy.runtime.worker_index == 1:
                raise RuntimeError("the first")
            time.sleep(4 * (strategy.runtime.worker_index == 0))
""".strip(),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(6)
def test_a_busy_worker_names_the_worker_that_failed_first(backend, tmp_path):
    """Worker 2 notices the failure of worker 1 and ends, before worker 0 notices anything."""
    addresses = local_addresses(3)
    with started(tmp_path, FAILS, environments_of(backend, addresses)) as scripts:
        for script in scripts:
            assert script.wait(60) != 0
        for index in (0, 2):
            lost = re.findall(r"The job lost (.*)", scripts[index].stderr())
            assert lost and all(line.startswith(f"worker 1 ({addresses[1]}): it") for line in lost), lost
            assert not any("worker 2" in line for line in lost), lost


# Worker 1 exits later than worker 0, whose error only reports the error of worker 1.
FAILS_ALONE = """
import atexit, os, sys, time
import keras, numpy as np
import kdist

strategy = kdist.MultiWorkerMirroredStrategy()
if strategy.cluster_resolver.task_id == 1:
    atexit.register(time.sleep, 0.3)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


def raises(epoch, logs):
    if strategy.cluster_resolver.task_id == 1:
        raise ValueError("only here")


def rows():
    yield np.ones((4, 3)), np.ones((4, 1))
    raises(0, {})


callback = keras.callbacks.LambdaCallback(on_epoch_end=raises)
if os.environ["FAILS_IN"] == "callback":
    model.fit(np.ones((4, 3)), np.ones((4, 1)), callbacks=[callback], verbose=0)
else:
    model.fit(rows(), verbose=0)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["callback", "data"])
@pytest.mark.in_turn(6)
def test_the_launcher_reports_the_worker_whose_code_failed(place, backend, tmp_path):
    command = (*RUN, "--num-workers", "2", "--backend", backend)
    with Script(tmp_path, "fails", FAILS_ALONE, {"FAILS_IN": place}, command) as job:
        assert job.wait(60) == 1
        report = job.stderr()[job.stderr().index("──── kdist:") :]
    assert re.match(r"──── kdist: worker 1 \([\d.:]+\) failed first: it ended with exit code 1", report), (
        report
    )
    assert 'raise ValueError("only here")' in report, report
