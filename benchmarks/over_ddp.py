"""Step time of `fit` on PyTorch with two workers, divided by `DistributedDataParallel` with `torch.nn` modules.

    python benchmarks/over_ddp.py [rounds]

Each round runs a job with kdist and a job with the hand-written loop, one after the other, for three models of equal
shapes: a small MLP (0.01 M parameters), a wide MLP (2.9 M) and a CNN. Each worker has one thread. The result is the
median ratio of all rounds, with the lowest and the highest.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROWS = 128  # of a global batch
STEPS = {"small": 300, "wide": 60, "cnn": 60}
WIDTHS = {"small": (64, 128, 10), "wide": (256, 1024, 1024, 1024, 512, 10)}
EPOCHS = 5


def with_kdist(name: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch with `fit`."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    import kdist

    layers = keras.layers
    with kdist.MultiWorkerMirroredStrategy().scope():
        if name == "cnn":
            shape: tuple[int, ...] = (28, 28, 1)
            inner = [
                *(layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D()),
                *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()),
                layers.Dense(10),
            ]
        else:
            shape, (*widths, last) = WIDTHS[name][:1], WIDTHS[name][1:]
            inner = [*(layers.Dense(width, "relu") for width in widths), layers.Dense(last)]
        model = keras.Sequential([keras.Input(shape), *inner])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random, count = np.random.default_rng(0), ROWS * STEPS[name]
    x, y = random.random((count, *shape), dtype="float32"), random.integers(0, 10, count)
    return lambda: model.fit(x, y, batch_size=ROWS, verbose=0)


def with_ddp(name: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch with a loop."""
    import torch
    from torch import nn

    torch.distributed.init_process_group("gloo")
    if name == "cnn":
        shape: tuple[int, ...] = (1, 28, 28)
        inner = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
        inner += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 10)]
    else:
        shape = WIDTHS[name][:1]
        inner = []
        for width, wider in zip(WIDTHS[name], WIDTHS[name][1:], strict=False):
            inner += [nn.Linear(width, wider), nn.ReLU()]
        inner.pop()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*inner))
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    rows = ROWS // 2
    x, y = torch.rand(rows * STEPS[name], *shape), torch.randint(0, 10, (rows * STEPS[name],))

    def epoch() -> None:
        total = torch.zeros(())
        for i in range(STEPS[name]):
            part = slice(i * rows, (i + 1) * rows)
            optimizer.zero_grad()
            value = loss(model(x[part]), y[part])
            value.backward()
            optimizer.step()
            total += value.detach()

    return epoch


def run_worker(kind: str, name: str) -> None:
    """Prints the milliseconds per step of the fastest of some epochs."""
    epoch = {"kdist": with_kdist, "ddp": with_ddp}[kind](name)
    epoch()
    times = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        epoch()
        times.append(time.perf_counter() - start)
    if os.environ["RANK"] == "0":
        print("milliseconds", min(times) / STEPS[name] * 1000)


def run_job(kind: str, name: str) -> float:
    """Returns the milliseconds per step of a job with two workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, __file__, kind, name],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split("milliseconds")[1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name in STEPS:
        times = [(run_job("kdist", name), run_job("ddp", name)) for _ in range(rounds)]
        ratios = sorted(ours / theirs for ours, theirs in times)
        ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{name:6} kdist {ours:6.2f} ms   DDP {theirs:6.2f} ms   "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_worker(*sys.argv[1:])
    else:
        main()
