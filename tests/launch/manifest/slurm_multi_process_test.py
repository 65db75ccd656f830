"""`kdist manifest slurm`: Bash runs the script, and the workers of its steps train. A fake replaces Slurm."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.environment import clean_environment
from tests.helpers.scripts import Script

TIMEOUT = 120
# Like srun: starts the tasks of a step on this machine, with srun's variables.
SRUN = """
import os, re, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
number = int(os.environ["SLURM_NTASKS"])
with open("steps", "a+") as steps:
    steps.seek(0)
    step = len(steps.readlines())
    steps.write(os.environ.get("KDIST_RESTART", "none") + "\\n")
tasks = [
    subprocess.Popen(words, env=os.environ | {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(number),
    })
    for rank in range(number)
]
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
# Replaces Python: asks the test for a process that has already imported the backend.
ASKS = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as test:
    test.connect("forks")
    test.sendall(json.dumps(dict(os.environ)).encode())
    test.shutdown(socket.SHUT_WR)
    sys.exit(int(test.makefile().read()))
"""


@pytest.fixture
def programs(tmp_path):
    """Creates the programs that the script calls; returns a function that replaces them."""
    folder = tmp_path / "programs"
    folder.mkdir()

    def write(name, source):
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)

    write("srun", f"#!{sys.executable}\n{SRUN}")
    write("scontrol", '#!/bin/bash\necho "$@" >> scontrol\n')
    write("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    return write


@pytest.fixture
def forks(programs, tmp_path, monkeypatch):
    """Forks the workers from a process that has imported the backend; yields the list of workers."""
    programs("python", f"#!{sys.executable} -IS\n{ASKS}")
    monkeypatch.chdir(tmp_path)
    workers = []

    def answer(connection):
        with connection, connection.makefile() as asked:
            env = json.loads(asked.read())
            name = f"step{env['SLURM_STEP_ID']}-{env['SLURM_PROCID']}"
            workers.append(Script(tmp_path, name, (tmp_path / "train.py").read_text(), env))
            code = workers[-1].wait(TIMEOUT)
            connection.sendall(str(code if code >= 0 else 128 - code).encode())

    def serve():
        try:
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
        except OSError:  # closed
            pass

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("forks")
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield workers
        listener.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.kill()


@pytest.fixture
def sbatch(manifest, programs, tmp_path):
    """Runs the script that `kdist manifest slurm` prints, as `sbatch` does."""

    def run(script, *options, **variables):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        text = manifest("slurm", "-n", "2", *options, "train.py", "an argument", "$b'")
        path = tmp_path / "job.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", str(path)], check=True)
        tasks = re.search(r"^#SBATCH --ntasks=(\d+)$", text, re.MULTILINE)
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": tasks[1], **variables}
        path_variable = {"PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", str(path)], env=clean_environment() | slurm | path_variable, cwd=tmp_path,
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip

    return run


def steps_of(folder):
    """Returns the value of `KDIST_RESTART` in each step."""
    return (folder / "steps").read_text().split()


@pytest.mark.in_turn(4)
def test_two_workers_train_on_after_a_failure(sbatch, forks, tmp_path):
    done = sbatch(
        """
        import keras, kdist, os
        from tests.helpers import by_hand

        strategy = kdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = by_hand.model(is_true=strategy.runtime.worker_index == 0)
        backup = kdist.callbacks.BackupAndRestore(os.environ["CHECKPOINT_DIR"], save_freq=1, delete_checkpoint=False)
        steps = []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
        if os.environ["KDIST_RESTART"] == "0":
            os.environ["KDIST_INJECT"] = "kill:worker=1,step=4"
        by_hand.fit(model, 2, backup, count)
        print(by_hand.show(model), len(steps), strategy.num_replicas_in_sync, flush=True)
        """,
        "--backend", "jax", "--checkpoint-dir", "saved here",
    )  # fmt: skip
    told = "\n".join([done.stderr, *(worker.stdout() + worker.stderr() for worker in forks)])
    assert done.returncode == 0 and steps_of(tmp_path) == ["0", "1"], told
    ends = [worker.stdout().split() for worker in forks[2:]]
    for first, *weights, steps, replicas in ends:
        assert first == "WEIGHTS" and int(replicas) == 2, told
        assert int(steps) < 2 * by_hand.STEPS, "the second start goes on, and does not begin anew"
        np.testing.assert_allclose([float(word) for word in weights], by_hand.weights(2), rtol=1e-5)
    assert len(ends) == 2 and (tmp_path / "saved here").is_dir()


def test_words_reach_the_workers_as_they_are(sbatch):
    note = 'it\'s $HOME `x` \\ \n"é"'
    script = (
        f"import os, sys; assert sys.argv[1:] == ['an argument', '$b\\''] and os.environ['NOTE'] == {note!r}"
    )
    assert sbatch(script, "--max-restarts", "0", "--env", f"NOTE={note}").returncode == 0


def test_all_tasks_of_a_job_get_one_secret(sbatch, tmp_path):
    script = "import os; open('tokens', 'a').write(os.environ['KDIST_CLUSTER_TOKEN'] + '\\n')"
    for own in ({}, {}, {"KDIST_CLUSTER_TOKEN": "mine"}):
        assert sbatch(script, "--max-restarts", "0", **own).returncode == 0
    one, same, another, again, *mine = (tmp_path / "tokens").read_text().split()
    assert one == same != another == again
    assert len(bytes.fromhex(one)) == len(bytes.fromhex(another)) == 16
    assert mine == ["mine", "mine"]


PLAIN = 'import os, sys; rank, start = (int(os.environ[n]) for n in ("SLURM_PROCID", "KDIST_RESTART"))\n'


@pytest.mark.kills("manifest_failed_step_not_started_again")
@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [
        ("0", 0, 1),
        ("1 if start == 0 and rank else 0", 0, 2),
        ("7", 7, 3),  # only two restarts
        ("2", 2, 1),
    ],
    ids=["success", "one_failure", "failures", "wrong_call"],
)
def test_a_failed_step_is_started_again(sbatch, tmp_path, ends, code, starts):
    done = sbatch(f"{PLAIN}sys.exit({ends})", "--max-restarts", "2")
    assert done.returncode == code, done.stderr
    assert steps_of(tmp_path) == [str(start) for start in range(starts)]
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.kills("manifest_preempted_job_not_requeued")
def test_a_preempted_job_goes_back_to_the_queue(sbatch, tmp_path):
    done = sbatch(f"{PLAIN}sys.exit(75)", SLURM_RESTART_COUNT="4", SLURM_JOB_ID="123")
    assert done.returncode == 75 and steps_of(tmp_path) == ["4"]
    assert (tmp_path / "scontrol").read_text() == "requeue 123\n"


def test_without_restarts_a_preempted_job_ends(sbatch, tmp_path):
    done = sbatch("import sys; sys.exit(75)", "--max-restarts", "0")
    assert done.returncode == 75 and not (tmp_path / "scontrol").exists()
    assert "--no-requeue" in (tmp_path / "job.sh").read_text()


def test_the_directives(manifest):
    text = manifest(
        "slurm", "-n", "4", "--nodes", "2", "--cpus", "3", "--gpus", "1", "--memory", "16G", "--time", "26:00:00",
        "--partition", "a100", "--account", "us", "--grace-period", "90", "--name", "big", "-m", "package.train",
    )  # fmt: skip
    directives = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert directives == [
        "job-name=big", "account=us", "partition=a100", "nodes=2", "ntasks=4", "cpus-per-task=3", "gpus-per-task=1",
        "mem-per-cpu=5462M", "time=1-02:00:00", "output=big-%j.log", "open-mode=append", "signal=TERM@90", "requeue",
    ]  # fmt: skip
    assert " --cpus-per-task=3 python -m package.train" in text
    # A worker that fails, or exits after saving, must not terminate workers that are still saving.
    assert "srun --kill-on-bad-exit=0 --wait=0 " in text
