"""A worker in `workers_multi_process_test.py`.

The environment variables `WHAT` and `WHOM` select an event and its worker.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import kdist
from kdist import handlers

WHAT, WHOM = os.environ["WHAT"], int(os.environ["WHOM"])
if WHAT == "kill before a long exit":  # which is after the exit handlers of kdist, as destructors are
    atexit.unregister(handlers._call_last)
    atexit.register(time.sleep, 1000)
    atexit.register(handlers._call_last)


def happen() -> None:
    if WHAT.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


class Happens(keras.callbacks.ProgbarLogger):
    """Poses as a callback of Keras: workers do not vote after each batch, so only steps connect them."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(0.01)  # so that the event happens in the middle of an epoch
        if batch == 20:
            print("BEGAN", time.monotonic(), flush=True)
            if me == WHOM:
                # Another thread sends the signal, as the kernel or an operator would.
                threading.Thread(target=happen).start()
                if WHAT == "raise":
                    raise ValueError("disk full")
                if WHAT == "exit":
                    sys.exit(3)


if WHAT == "too-late":
    keras.ops.zeros((3,))

strategy = kdist.MultiWorkerMirroredStrategy()
me = strategy.runtime.worker_index
if WHAT == "twice":
    assert kdist.MultiWorkerMirroredStrategy().runtime.group.all_gather_bytes(b"%d" % me) == [b"0", b"1"]
    other = kdist.cluster_resolver.SimpleClusterResolver(
        kdist.cluster_resolver.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}),
        task_type="worker",
        task_id=me,
    )
    try:
        kdist.MultiWorkerMirroredStrategy(other)
    except kdist.errors.StrategyScopeError as error:
        print("REFUSED", error)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((384, 4), "float32")
epochs = 1 if WHAT in ("late", "twice", "none") else 500
Happens.__module__ = "keras.test"
try:
    model.fit(x, x[:, :1], batch_size=6, epochs=epochs, verbose=0, callbacks=[Happens()])
except kdist.errors.WorkerLostError:
    print("WEIGHTS", np.isfinite(model.get_weights()[0]).all(), flush=True)
    raise
if WHAT == "late" and me == WHOM:
    time.sleep(4)
print("DONE", flush=True)
