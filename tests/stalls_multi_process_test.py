"""Who counts as hung: a worker that is waited for and neither moves nor computes. No framework is needed."""

from __future__ import annotations

import pytest

from tests.processes import Script

PRELUDE = """
import os, subprocess, sys, threading, time
from kdist.backends import stalls, whereabouts

class Board(stalls.Board):
    said = []
    waiting = {0: "all_reduce at step 3 of epoch 1"}
    pending = False
    def say(self, text): self.said.append(text)
    def read(self): return self.waiting
    def waits_in(self, filename): return self.pending

board = Board()
whereabouts.enter("step", 1, 3)
watch = stalls.StallWatch(board, ["worker 0", "worker 1"], 1)
"""
HUNG = {
    "sleep": "time.sleep(60)",
    "sleeps again and again": "while True: time.sleep(0.05)",
    "deadlock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "another thread sleeps": (
        "t = threading.Thread(target=time.sleep, args=(60,), daemon=True); t.start(); t.join()"
    ),
    "in a call": "with stalls.entered(): time.sleep(60)",
}
ALIVE = {
    "nobody waits": "board.waiting = {}; time.sleep(3)",
    "waits for others itself": "board.pending = True; time.sleep(3); print(board.said[0])",
    "computes": "end = time.monotonic() + 3\nwhile time.monotonic() < end: pass",
    "computes now and then": "for _ in range(12): sum(range(3_000_000)); time.sleep(0.25)",
    "moves": "for _ in range(15):\n    time.sleep(0.1)\n    time.sleep(0.1)",
    "takes steps": "for _ in range(15):\n    whereabouts.total_steps += 1\n    time.sleep(0.2)",
    "a child computes": "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 2: pass'])",
    "a thread computes": (
        "def work():\n    end = time.monotonic() + 3\n    while time.monotonic() < end: sum(range(10_000))\n"
        "t = threading.Thread(target=work); t.start(); t.join()"
    ),
    "at a prompt": "sys.ps1 = '>>> '; time.sleep(3)",
    "is about to end": "watch.close(); time.sleep(3)",
}


def start_all(folder, bodies):
    env = {"KDIST_HEARTBEAT_TIMEOUT": "2", "PYTHONSAFEPATH": "1"}
    return {
        name: Script(folder, f"script{i}", f"{PRELUDE}\n{body}\nprint('ALIVE')", env)
        for i, (name, body) in enumerate(bodies.items())
    }


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    started = start_all(tmp_path_factory.mktemp("stalls"), HUNG | ALIVE)
    yield started
    for script in started.values():
        script.kill()


@pytest.mark.parametrize("name", HUNG)
def test_hung(scripts, name):
    script = scripts[name]
    assert script.wait(30) == 70, script.stdout() + script.stderr()
    said = script.stderr()
    assert "worker 1 has hung: its main thread has neither moved nor computed" in said
    assert "at step 3 of epoch 1, and others wait for it: worker 0 in all_reduce at step 3" in said
    assert "Traceback (most recent call last):\n" in said and '.py", line' in said


@pytest.mark.parametrize("name", ALIVE)
def test_not_hung(scripts, name):
    script = scripts[name]
    assert script.wait(30) == 0, script.stderr()
    assert "ALIVE" in script.stdout()
    if name == "waits for others itself":
        assert "the collectives of the step at step 3 of epoch 1" in script.stdout()
