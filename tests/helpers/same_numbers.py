"""Trains one model on the workers of a job, and compares the numbers with one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.helpers.compare import assert_close
from tests.helpers.processes import run_plain
from tests.helpers.scripts import Script

SCRIPT = """
import json, os, sys
import numpy as np

def train(strategy):
    import contextlib, keras
    # Seeds one by one: Keras's `set_random_seed` imports TensorFlow everywhere.
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in (3, 4))
    with strategy.scope() if strategy else contextlib.nullcontext():
        hidden = keras.layers.Dense(3, "tanh", kernel_initializer=first)
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1, kernel_initializer=second)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.RandomState(0).randn(30, 4).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=7, epochs=3, shuffle=False, verbose=0, validation_data=(x, x[:, :1]))
    return history.history | {"predict": model.predict(x, verbose=0)[:, 0].tolist()}

if __name__ == "__main__":
    import kdist
    strategy = kdist.MultiWorkerMirroredStrategy()
    numbers = [strategy.runtime.worker_index, strategy.num_replicas_in_sync, train(strategy)]
    print("NUMBERS " + json.dumps(numbers), flush=True)
"""


def check_numbers(backend: str, num_workers: int, scripts: Sequence[Script]) -> None:
    """Waits for the scripts, which run `SCRIPT` in all workers, and compares each worker's numbers."""
    printed = [line for script in scripts for line in script.finish().stdout().splitlines()]
    found = [json.loads(line.partition("NUMBERS ")[2]) for line in printed if "NUMBERS " in line]
    assert sorted(one[:2] for one in found) == [[rank, num_workers] for rank in range(num_workers)]
    expected = run_plain(backend, _one_device)
    for _, _, numbers in found:
        assert_close(numbers, expected)


def _one_device() -> Any:
    namespace: dict[str, Any] = {"__name__": "one_device"}
    exec(SCRIPT, namespace)
    return namespace["train"](None)
