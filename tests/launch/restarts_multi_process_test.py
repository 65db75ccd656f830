"""`kdist run` after a failure: restarts, fewer workers, preemption. The workers are plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import json, os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["KDIST_RESTART"])
port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
print("START", restart, rank, os.environ["WORLD_SIZE"], port, flush=True)
def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    def start(script, *options, env=None):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script))
        kept = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "TF_CONFIG")}
        done = subprocess.run(
            [sys.executable, "-m", "kdist", "run", *options, str(path)],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, stdin=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": str(ROOT), **(env or {})},
        )  # fmt: skip
        starts = [line.split()[-4:] for line in done.stdout.splitlines() if "START" in line]
        return done.returncode, starts, done.stderr

    return start


def test_the_job_starts_again_until_it_ends_well(run, tmp_path):
    code, starts, err = run(
        "print('LOG', restart)\nif rank == 1 and restart < 2: die()",
        "-n", "2", "--max-restarts", "3", "--log-dir", "logs",
    )  # fmt: skip
    assert code == 0, err
    assert sorted((int(s[0]), int(s[1]), int(s[2])) for s in starts) == [
        (i, r, 2) for i in range(3) for r in (0, 1)
    ]
    assert len({s[3] for s in starts}) == 3  # fresh ports
    assert (
        "kdist: restart 1 of 3 because worker 1 was killed by SIGKILL (signal 9); starting 2 workers." in err
    )
    assert "restart 2 of 3" in err and "restart 3" not in err
    assert [n for n in range(3) if f"LOG {n}" in (tmp_path / "logs/worker-0.log").read_text()][-1] == 2


@pytest.mark.kills("launch_fails_without_its_log_directory")
def test_the_job_starts_again_without_its_log_directory(run, tmp_path):
    script = "import shutil\nif restart == 0: shutil.rmtree('logs')\nsys.exit(restart == 0)"
    code, _, err = run(script, "-n", "1", "--max-restarts", "1", "--log-dir", "logs")
    assert code == 0 and "START 1" in (tmp_path / "logs" / "worker-0.log").read_text(), err


@pytest.mark.kills("launch_fails_if_its_log_cannot_be_written")
def test_the_job_goes_on_if_its_logs_cannot_be_written(run, tmp_path):
    (tmp_path / "logs" / "worker-1.log").mkdir(parents=True)
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    code, _, err = run("sys.exit(restart == 0)", "-n", "2", "--max-restarts", "1", "--log-dir", "logs")
    assert code == 0 and "restart 1 of 1" in err
    for index, why in enumerate(("No space left on device", "Is a directory")):
        assert err.count(f"kdist: the log logs/worker-{index}.log is incomplete: {why}.") == 2, err


@pytest.mark.kills("launch_restart_not_counted")
def test_restarts_have_an_end(run):
    code, starts, err = run("if rank == 0: sys.exit(7)\ntime.sleep(60)", "-n", "2", "--max-restarts", "1")
    assert (code, {s[0] for s in starts}) == (7, {"0", "1"})
    assert err.count("failed first: it ended with exit code 7") == 2


def test_without_the_option_nothing_is_started_again(run):
    code, starts, err = run("if rank == 1: die()\ntime.sleep(60)", "-n", "2")
    assert (code, len(starts)) == (137, 2) and "restart" not in err


@pytest.mark.kills("launch_ended_worker_not_reported")
def test_the_report_names_a_worker_that_has_ended_before(run):
    script = "if rank == 0: sys.exit(0)\ntime.sleep(0.5 if rank == 1 else 60)\nsys.exit('rank 0 is missing')"
    code, _, err = run(script, "-n", "3")
    assert code == 1
    assert err.endswith(
        "rank 0 is missing\nBefore that, these workers had ended with exit code 0: worker 0.\n"
        "kdist terminated the other workers: worker 2.\n"
    )


@pytest.mark.kills("launch_too_few_workers")
def test_it_goes_on_with_fewer_workers_but_not_too_few(run):
    script = """
    if restart < 3 and rank == int(os.environ["WORLD_SIZE"]) - 1: die()
    time.sleep(0.3 if restart == 3 else 60)
    """
    code, starts, err = run(script, "-n", "3", "--min-workers", "2", "--max-restarts", "2")
    assert code == 0, err
    assert [next(s[2] for s in starts if s[0] == str(i)) for i in range(4)] == ["3", "2", "2", "2"]
    assert "restart 1 with fewer workers because worker 2 was killed" in err and "restart 2 of 2" in err
    # A worker that exits with an error does not count as lost.
    code, starts, err = run("sys.exit(3 if rank else 0)", "-n", "2", "--min-workers", "1")
    assert (code, len(starts)) == (3, 2)


@pytest.mark.kills("launch_preemption_counted", "launch_preempted_forever")
def test_preemption_does_not_count(run):
    # The second worker takes longer to save its share.
    script = "time.sleep(rank)\nsys.exit(75) if restart < 2 else None\nif restart == 2: sys.exit(1)"
    code, starts, err = run(script, "-n", "2", "--max-restarts", "1")
    assert code == 0, err
    assert {s[0] for s in starts} == {"0", "1", "2", "3"}
    assert err.count("(not counted) because worker 0 was preempted") == 2 and "restart 1 of 1" in err
    assert run("sys.exit(75)", "-n", "2")[0] == 75
    # Otherwise, a script that exits with 75 at each start would restart forever.
    code, starts, err = run("sys.exit(75)", "-n", "1", "--max-restarts", "1")
    assert (code, len(starts), err.count("(not counted)"), err.count("restart 1 of 1")) == (75, 5, 3, 1)


def test_a_stopped_worker_is_the_one_that_is_lost(run):
    script = """
    if restart == 0:
        if rank == 1: die(signal.SIGSTOP)
        time.sleep(1)
        sys.exit("worker 1 is missing")
    """
    code, starts, err = run(script, "-n", "2", "--min-workers", "1")
    assert code == 0, err
    assert "──── kdist: worker 1" in err and "was stopped by a signal such as SIGSTOP" in err
    assert [s[2] for s in starts if s[0] == "1"] == ["1"]


@pytest.mark.kills("launch_heartbeat_not_told")
def test_what_the_workers_are_told(run, tmp_path):
    script = """
    print("TOLD", restart, os.environ["KDIST_INJECT"], os.environ["KDIST_HEARTBEAT_TIMEOUT"],
          os.environ["KDIST_HANG_TIMEOUT"], flush=True)
    sys.exit(1 if restart == 0 else 0)
    """
    code, _, err = run(
        script, "-n", "1", "--max-restarts", "1", "--heartbeat-timeout", "7.50",
        "--hang-timeout", "90", "--log-dir", "logs",
        "--inject", "kill:worker=0,step=3", "--inject", "slow:seconds=2,always=1",
    )  # fmt: skip
    assert code == 0, err
    told = [s for s in (tmp_path / "logs/worker-0.log").read_text().splitlines() if s.startswith("TOLD")]
    assert told == [
        "TOLD 0 kill:worker=0,step=3;slow:seconds=2,always=1 7.5 90",
        "TOLD 1 slow:seconds=2,always=1 7.5 90",
    ]
