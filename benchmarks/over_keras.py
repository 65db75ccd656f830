"""Step time of `fit`, `evaluate` and `predict` under a kdist strategy on one CPU, divided by plain Keras.

    python benchmarks/over_keras.py torch|jax|tensorflow [rounds]

Each round runs a process with kdist, and then a process without it. Both train the same small models on the same data.
The result is the median ratio of all rounds, with the lowest and the highest.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

METHODS = ("fit", "evaluate", "predict")
STEPS, ROWS, EPOCHS = 40, 64, 4


def models() -> dict[str, tuple[tuple[int, ...], Callable[[], Sequence[Any]]]]:
    """Returns the shape of a row and the layers of each model, without the last layer."""
    from keras import layers

    return {
        "MLP": ((64,), lambda: [layers.Dense(128, "relu"), layers.Dropout(0.5)]),
        "wide MLP": ((256,), lambda: [layers.Dense(width, "relu") for width in (1024, 1024, 1024, 512)]),
        "CNN": (
            (28, 28, 1),
            lambda: [
                *(layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D()),
                *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()),
            ],
        ),
        "CNN with batch normalization": (
            (28, 28, 1),
            lambda: [
                *(layers.Conv2D(16, 3), layers.BatchNormalization(), layers.ReLU()),
                *(layers.Conv2D(32, 3, 2), layers.BatchNormalization(), layers.ReLU()),
                layers.GlobalAveragePooling2D(),
            ],
        ),
        "LSTM": ((20, 16), lambda: [layers.LSTM(32)]),
        "embedding": ((20,), lambda: [layers.Embedding(5000, 32), layers.GlobalAveragePooling1D()]),
    }


def run_process(with_kdist: bool) -> None:
    """Prints the milliseconds per step of each model and method as JSON."""
    if with_kdist:
        import kdist
    import keras
    import numpy as np

    random, found = np.random.default_rng(0), {}
    count = STEPS * ROWS
    for name, (shape, layers) in models().items():
        x = random.random((count, *shape), "float32")
        x = (5000 * x).astype("int32") if name == "embedding" else x
        y = random.integers(0, 10, count)
        scope = kdist.OneDeviceStrategy("cpu:0").scope() if with_kdist else contextlib.nullcontext()
        with scope:
            model = keras.Sequential([keras.Input(shape), *layers(), keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
        for method in METHODS:
            data = (x,) if method == "predict" else (x, y)
            times = []
            for _ in range(EPOCHS):
                start = time.perf_counter()
                getattr(model, method)(*data, batch_size=ROWS, verbose=0)
                times.append((time.perf_counter() - start) / STEPS * 1000)
            found[f"{name}, {method}"] = min(times[1:])  # the first epoch compiles
    print("milliseconds", json.dumps(found))


def main(backend: str, rounds: int) -> None:
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        ours, theirs = (_milliseconds(backend, kind) for kind in ("kdist", "keras"))
        for name, milliseconds in ours.items():
            ratios.setdefault(name, []).append(milliseconds / theirs[name])
    for name, each in ratios.items():
        print(f"{name:40} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


def _milliseconds(backend: str, kind: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "process", kind],
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.split("milliseconds")[1])
    return found


if __name__ == "__main__":
    if sys.argv[1] == "process":
        run_process(sys.argv[2] == "kdist")
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
