"""`--inject` on jobs that train: only faults with `always=1` occur again after a restart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import RUN, Script

SCRIPT = """
import kdist
from tests.helpers import by_hand

with kdist.MultiWorkerMirroredStrategy().scope():
    model = by_hand.model()
by_hand.fit(model, 3)
print("FINISHED", flush=True)
"""


@pytest.mark.in_turn(4)
def test_a_fault_comes_again_after_a_restart_where_it_is_told_to(tmp_path: Path) -> None:
    options = ("-n", "2", "--backend", "jax", "--max-restarts", "1")
    faults = ("--inject", "exit:worker=1,step=3", "--inject", "exit:worker=0,step=5,always=1")
    job = Script(tmp_path, "train", SCRIPT, {}, (*RUN, *options, *faults)).finish(240, code=1)
    err = job.stderr()
    assert "FINISHED" not in job.stdout()
    said = re.findall(r"\[worker (\d)\] kdist: --inject (\S+) takes effect at (.*)", err)
    assert said == [
        ("1", "exit:worker=1,step=3", "step 3 of epoch 1"),
        ("0", "exit:worker=0,step=5,always=1", "step 2 of epoch 2"),
    ]
    assert len(re.findall(r"failed first: it ended with exit code 1", err)) == 2
    assert re.search(r"restart 1 of 1 because worker \d ended with exit code 1; starting 2 workers\.", err)
