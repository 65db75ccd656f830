"""`kdist run` when its terminal closes (SIGHUP). The workers are plain Python."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.alive import identity_of, left_of
from tests.helpers.scripts import RUN, Script

SCRIPT = """
import os, signal, sys, time

def save(*_):
    print("told", os.environ["RANK"], flush=True)
    sys.exit(int(os.environ["CODE"]))

if "CODE" in os.environ:
    signal.signal(signal.SIGHUP, save)
print("born", os.environ["RANK"], os.getpid(), flush=True)
time.sleep(100)
"""


# The signal kills the workers; or they save, and then ask for a restart (75) or exit (0).
@pytest.mark.parametrize(("code", "ends_with"), [(None, 128 + signal.SIGHUP), (75, 75), (0, 0)])
def test_the_workers_are_told_and_nothing_is_started_again(
    code: int | None, ends_with: int, tmp_path: Path
) -> None:
    command = (*RUN, "-n", "2", "--max-restarts", "3", "--grace-period", "20")
    with Script(tmp_path, "script", SCRIPT, {} if code is None else {"CODE": str(code)}, command) as job:
        for rank in (0, 1):
            job.wait_for(f"born {rank} ", 30)
        workers = [identity_of(int(pid)) for pid in re.findall(r"born \d (\d+)", job.stdout())]
        os.kill(job.process.pid, signal.SIGHUP)
        job.finish(30, code=ends_with)
    out, err = job.stdout(), job.stderr()
    assert "kdist: received SIGHUP; all workers have exited." in err
    assert "restart" not in err
    assert out.count("born") == 2
    assert sorted(line[-6:] for line in out.splitlines() if "told" in line) == (
        [] if code is None else ["told 0", "told 1"]
    )
    assert len(workers) == 2 and left_of(workers, within=5) == []


@pytest.mark.kills("launch_nohup_without_effect")
def test_a_job_under_nohup_continues(tmp_path: Path) -> None:
    script = 'import time\nprint("born", flush=True)\ntime.sleep(1)\nprint("done")\n'
    with Script(tmp_path, "script", script, {}, ("nohup", *RUN, "-n", "2")) as job:
        job.wait_for("born", 30)
        os.kill(job.process.pid, signal.SIGHUP)
        job.finish(30)
    assert job.stdout().count("done") == 2
