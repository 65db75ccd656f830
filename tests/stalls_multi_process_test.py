"""Who counts as hung, in real processes and by the real clock. Who does not is in `stalls_test.py`."""

from __future__ import annotations

import pytest

from tests.processes import Script

PRELUDE = """
import time
from kdist.backends import stalls, whereabouts

class Board(stalls.Board):
    def say(self, text): pass
    def read(self): return {0: "all_reduce at step 3 of epoch 1"}
    def waits_in(self, filename): return False

whereabouts.enter("step", 1, 3)
watch = stalls.StallWatch(Board(), ["worker 0", "worker 1"], 1).start()
"""
HUNG = {
    "sleeps again and again": "while True: time.sleep(0.05)",
    "in a call": "with stalls.entered(): time.sleep(100)",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stalls")
    env = {"KDIST_HEARTBEAT_TIMEOUT": "2", "PYTHONSAFEPATH": "1"}
    started = {
        name: Script(folder, f"script{i}", f"{PRELUDE}\n{body}\n", env)
        for i, (name, body) in enumerate(HUNG.items())
    }
    yield started
    for script in started.values():
        script.kill()


@pytest.mark.xdist_group("stalls")
@pytest.mark.parametrize("name", HUNG)
def test_hung(scripts, name):
    script = scripts[name]
    assert script.wait(60) == 70, script.stdout() + script.stderr()
    said = script.stderr()
    assert "worker 1 has hung: its main thread has neither moved nor computed" in said
    assert "at step 3 of epoch 1, and others wait for it: worker 0 in all_reduce at step 3" in said
    assert "Traceback (most recent call last):\n" in said and '.py", line' in said
