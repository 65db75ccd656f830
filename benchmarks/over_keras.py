"""Step time of `fit`, `evaluate` and `predict` under a kdist strategy on one CPU, divided by plain Keras.

    python benchmarks/over_keras.py torch|jax|tensorflow [rounds]

Each round starts a process with kdist and a process without it. They train the same small models on the same data, and
take turns after each epoch, so that both see the same load of the machine. The ratio of a round is the fastest epoch
with kdist, divided by the fastest without it. The result is the median of all rounds, with the lowest and the highest.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

METHODS = ("fit", "evaluate", "predict")
STEPS, ROWS, EPOCHS = 40, 64, 6


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


def answer_requests(with_kdist: bool) -> None:
    """Trains, evaluates or predicts for each line of standard input. Prints the milliseconds per step.

    A line is the name of a model and a method, with a tab between them.
    """
    if with_kdist:
        import kdist
    import keras
    import numpy as np

    known: dict[str, tuple[keras.Model, Any, Any]] = {}
    for line in sys.stdin:
        name, method = line.strip().split("\t")
        if name not in known:
            (shape, layers), random = models()[name], np.random.default_rng(0)
            x = random.random((STEPS * ROWS, *shape), "float32")
            x = (5000 * x).astype("int32") if name == "embedding" else x
            y = random.integers(0, 10, STEPS * ROWS)
            with kdist.OneDeviceStrategy("cpu:0").scope() if with_kdist else contextlib.nullcontext():
                model = keras.Sequential([keras.Input(shape), *layers(), keras.layers.Dense(10)])
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile("adam", loss, metrics=["accuracy"])
            known[name] = model, x, y
        model, x, y = known[name]
        start = time.perf_counter()
        getattr(model, method)(*(x,) if method == "predict" else (x, y), batch_size=ROWS, verbose=0)
        print("milliseconds", (time.perf_counter() - start) / STEPS * 1000, flush=True)


class Contender:
    """A process that answers requests. It waits while the other process computes."""

    def __init__(self, backend: str, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "process", kind],
            env=os.environ | {"KERAS_BACKEND": backend},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def milliseconds(self, name: str, method: str) -> float:
        """Returns the time per step of one epoch."""
        print(name, method, sep="\t", file=self._input, flush=True)
        for line in self._output:
            if line.startswith("milliseconds"):
                return float(line.split()[1])
        raise SystemExit(f"The process ended with exit code {self._process.wait()}.")

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def main(backend: str, rounds: int) -> None:
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        pair = [Contender(backend, kind) for kind in ("kdist", "keras")]
        for name, method in itertools.product(models(), METHODS):
            epochs = [[each.milliseconds(name, method) for each in pair] for _ in range(EPOCHS)]
            ours, theirs = map(min, zip(*epochs[1:], strict=True))  # the first epoch compiles
            ratios.setdefault((name, method), []).append(ours / theirs)
        for each in pair:
            each.end()
    for key, found in ratios.items():
        print(f"{', '.join(key):40} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    if sys.argv[1] == "process":
        answer_requests(sys.argv[2] == "kdist")
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
