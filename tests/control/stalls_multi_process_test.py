"""Detection of hung workers in real processes with the real clock; `stalls_test.py` uses a fake clock."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers.models import network
from tests.helpers.processes import ForkedPool, each_backend_in_twelve_turns
from tests.helpers.scripts import Script

PRELUDE = """
import time
from kdist.control import stalls, whereabouts

class Board(stalls.Board):
    names, index = ["worker 0", "worker 1"], 1
    def say(self, text): pass
    def waiting(self): return {0: "all_reduce at step 3 of epoch 1"}

whereabouts.enter("step", 1, 3)
watch = stalls.StallWatch(Board(), lambda filename: False).start()
"""
HUNG = {
    "sleeps again and again": "while True: time.sleep(0.05)",
    "in a call": "with stalls.entered(): time.sleep(100)",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stalls")
    env = {"KDIST_HEARTBEAT_TIMEOUT": "2", "KDIST_HANG_TIMEOUT": "2", "PYTHONSAFEPATH": "1"}
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
    assert "worker 1 hung: its main thread made no progress" in said
    assert "at step 3 of epoch 1. Other workers wait for it: worker 0 in all_reduce at step 3" in said
    assert "Traceback (most recent call last):\n" in said and '.py", line' in said


def uploads(longest, after):
    """Trains while the chief waits in a callback, as for a server. The other worker waits in the next step.

    A busy machine suspects the chief late. The chief therefore waits for the warning, and then for `after` seconds.
    """
    import keras
    import numpy as np

    import kdist
    from kdist.control import stalls

    said, warned = [], threading.Event()

    def print_stack(text):
        said.append(text)
        warned.set()

    stalls.print_stack = print_stack

    class Upload(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and kdist.cluster_resolver.TFConfigClusterResolver().task_id == 0:
                warned.wait(longest)
                time.sleep(after)

    model = network(1, inputs=2, scope=kdist.MultiWorkerMirroredStrategy().scope())
    x = np.ones((12, 2), "float32")
    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[Upload()]).history
    return said, len(history["loss"])


@pytest.mark.kills(resting_chief_ended="[torch]")
@each_backend_in_twelve_turns
def test_a_chief_that_waits_for_an_upload_is_not_ended(backend):
    # With a heartbeat timeout of 6 s, kdist suspects the chief after 4.2 s.
    pool = ForkedPool(2, backend, env={"KDIST_HEARTBEAT_TIMEOUT": 6}, timeout=60)
    try:
        (said, epochs), (others, _) = pool.run(uploads, 40, 3)
    finally:
        pool.close()
    assert epochs == 2 and others == []
    assert said and "worker 0 (" in said[0] and "seems to hang: its main thread made no progress" in said[0]
    assert "wait for it: worker 1" in said[0] and "terminates it after 600 s" in said[0]
