"""Signals to `kdist run`, and the end of a job: no process is left, and workers get their grace period."""

import os
import select
import signal
import time

import pytest

from tests.helpers.alive import is_alive, left_of
from tests.launch.jobs import SLEEPER

FAMILY = f"""
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
apart = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
bare = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True, env={{}})
# A double fork: its parent is gone, and only the job's mark or the subreaper finds it.
orphan = subprocess.run(
    [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
     + repr({SLEEPER!r}) + "], start_new_session=True, stdout=-3, stderr=-3).pid)"],
    capture_output=True, text=True).stdout.strip()
for pid in (os.getpid(), child.pid, apart.pid, bare.pid, orphan): name(pid)
say("born", rank)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(run, signum):
    job = run(FAMILY + "time.sleep(100)\n", "-n", "2")
    job.wait_for("born 0", "born 1")
    family = job.named()
    assert len(family) == 10 and all(map(is_alive, family))
    job.process.send_signal(signum)
    assert job.wait() == 128 + signum
    assert left_of(family) == []
    assert "all workers have exited" in job.stderr()


@pytest.mark.kills("launch_children_left")
def test_failure_and_success_leave_nothing_behind(run):
    for end, code in (("sys.exit(4)", 4), ("os._exit(0)", 0)):
        job = run(FAMILY + f"time.sleep(0.5)\n{end}\n", "-n", "2")
        assert job.wait() == code
        assert len(job.named()) == 10
        assert left_of(job.named()) == []


def test_a_killed_launcher_takes_its_workers_along(run):
    job = run('name(os.getpid()); say("born", rank); time.sleep(100)', "-n", "2")
    job.wait_for("born 0", "born 1")
    job.process.kill()
    job.wait()
    # No process waits for these workers, so the system may take a while to end them.
    assert len(job.named()) == 2 and left_of(job.named(), within=10) == []


STUBBORN = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
name(os.getpid()); say("born", rank)
while True: time.sleep(1)
"""


@pytest.mark.kills("launch_grace_without_end")
def test_the_grace_period_ends(run):
    job = run(STUBBORN, "-n", "2", "--grace-period", "0.5")
    job.wait_for("born 0", "born 1")
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert 0.4 < time.monotonic() - start < 8  # the workers never exit by themselves
    assert len(job.named()) == 2 and left_of(job.named()) == []


def test_the_second_ctrl_c_kills_at_once(run):
    job = run(STUBBORN, "-n", "2", "--grace-period", "60")
    job.wait_for("born 0", "born 1")
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(20) == 130
    assert len(job.named()) == 2 and left_of(job.named()) == []


@pytest.mark.kills("launch_signal_without_reader_ignored")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_also_if_nobody_reads_its_output(run, signum):
    ours, theirs = os.pipe()
    try:
        script = """
        sys.stdout = sys.stderr
        name(os.getpid())
        while True: os.write(1, b"x" * 5000)
        """
        job = run(script, "-n", "2", "--grace-period", "0.5", stdout=theirs)
        while select.select([], [theirs], [], 0)[1]:
            assert job.process.poll() is None, job.stderr()
            time.sleep(0.02)
        time.sleep(0.5)  # the launcher reads more, and waits for the reader of its own output
        job.process.send_signal(signum)
        assert job.wait() == 128 + signum
        job.out.write_text(job.stderr())
    finally:
        os.close(ours)
        os.close(theirs)
    assert len(job.named()) == 2 and left_of(job.named()) == []
    assert "all workers have exited" in job.stderr()


def test_workers_may_end_in_peace(run):
    job = run(
        """
        def save(*_):
            time.sleep(0.3); say("saved", rank); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say("born", rank); time.sleep(100)
        """,
        "-n", "2",
    )  # fmt: skip
    job.wait_for("born 0", "born 1")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0
    assert "saved 0" in job.stdout() and "saved 1" in job.stdout()


@pytest.mark.kills("launch_signal_after_failure_ignored")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_a_failure_prevents_the_restart(run, signum):
    # The launcher terminates worker 1 because worker 0 has failed. At this moment, the launcher gets the signal.
    job = run(
        f"""
        say("start", os.environ["KDIST_RESTART"])
        if rank == 0:
            while not os.path.exists("ready"): time.sleep(0.02)
            sys.exit(7)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), {int(signum)}))
        open("ready", "w").close()
        time.sleep(60)
        """,
        "-n", "2", "--max-restarts", "1",
    )  # fmt: skip
    assert job.wait() == 7
    assert "start 1" not in job.stdout() and "; the job is not restarted." in job.stderr()
