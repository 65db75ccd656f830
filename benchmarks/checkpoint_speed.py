"""Speed of writing and reading checkpoints, and slowdown of training while a save runs in the background.

    python benchmarks/checkpoint_speed.py torch [directory] [gigabytes]

The baselines are a plain write with fsync and a plain read into memory, of the same bytes in the same processes. Each
worker writes its share, and reads all bytes, as a restore does. Use a directory on a real disk. Files that were just
written are still in the page cache when they are read.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from typing import Any

import kdist

ROUNDS = 3
NUM_VARIABLES = 16
ENV = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def plain_write(path: str, data: Any) -> None:
    """Writes bytes and waits until they are on disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 32 << 20]) :]
    os.fsync(fd)
    os.close(fd)


def plain_read(paths: list[str]) -> None:
    """Reads files into memory."""
    kept = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            data = bytearray(os.path.getsize(path))
            file.readinto(data)
            kept.append(data)


def measure(folder: str, num_bytes: int) -> dict[str, list[float]]:
    """Runs in every worker: returns the seconds of each operation, per round."""
    import keras
    import numpy as np

    strategy = kdist.MultiWorkerMirroredStrategy()
    index, workers = strategy.runtime.worker_index, strategy.runtime.num_workers
    length = num_bytes // NUM_VARIABLES // 4
    random = np.random.RandomState(index)
    with strategy.scope():
        variables = [keras.Variable(random.rand(length).astype("float32")) for _ in range(NUM_VARIABLES)]
    checkpoint = kdist.Checkpoint(weights=variables, random=False)
    share = random.bytes(1 << 20) * (num_bytes // workers >> 20)
    plain = [os.path.join(folder, f"plain-{worker}") for worker in range(workers)]
    seconds: dict[str, list[float]] = {}
    path = ""

    def take(name: str, way: Any) -> None:
        kdist.barrier()
        start = time.perf_counter()
        way()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    def save(**options: Any) -> None:
        nonlocal path
        path = checkpoint.save(folder, **options)

    def remove(*paths: str) -> None:
        kdist.barrier()
        if index == 0:
            for name in paths:
                shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
        kdist.barrier()

    # Files are removed immediately, because recently freed memory is faster than other memory.
    for _ in range(ROUNDS):
        take("write", lambda: plain_write(plain[index], share))
        take("read", lambda: plain_read(plain))
        remove(*plain)
        take("save", lambda: save(asynchronous=False))
        take("restore", lambda: checkpoint.restore(path))
        remove(path)
        take("pause", save)
        take("behind", checkpoint.wait)
        remove(path)
    return seconds


def measure_steps(folder: str, num_bytes: int) -> tuple[float, float, float]:
    """Runs in every worker: returns the seconds per step without and during saves, and the delay by a save."""
    import keras
    import numpy as np

    strategy = kdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        ballast = [
            keras.Variable(np.ones(num_bytes // NUM_VARIABLES // 4, "float32")) for _ in range(NUM_VARIABLES)
        ]
        model = keras.Sequential([keras.Input((256,)), *[keras.layers.Dense(512) for _ in range(3)]])
        model.compile("adam", "mse")
    checkpoint = kdist.Checkpoint(model=model, ballast=ballast, random=False)
    x = np.random.RandomState(0).rand(64, 256).astype("float32")
    y = np.zeros((64, 512), "float32")

    def steps(until: Any) -> float:
        start, number = time.perf_counter(), 0
        while not until(number):
            model.train_on_batch(x, y)
            number += 1
        return (time.perf_counter() - start) / number

    quiet, busy, pauses = [], [], []

    def agree(ready: bool) -> bool:
        # Every worker must run the same number of steps. This also runs without a save, so that its cost cancels out.
        return all(kdist.all_gather_object(ready))

    steps(lambda number: agree(number >= 20))
    for _ in range(ROUNDS):
        quiet.append(steps(lambda number: agree(number >= 200)))
        start = time.perf_counter()
        path = checkpoint.save(folder)
        pauses.append(time.perf_counter() - start)
        busy.append(steps(lambda number: agree(number >= 10 and not checkpoint.is_saving)))
        checkpoint.wait()
        if strategy.runtime.worker_index == 0:
            shutil.rmtree(path)
    return float(np.median(quiet)), float(np.median(busy)), float(np.median(pauses))


def main() -> None:
    """Prints a row per number of workers."""
    from statistics import median

    backend = sys.argv[1] if len(sys.argv) > 1 else "torch"
    parent = sys.argv[2] if len(sys.argv) > 2 else "."
    num_bytes = int(float(sys.argv[3]) * 2**30) if len(sys.argv) > 3 else 1 << 30
    print(f"{backend}: {num_bytes / 1e9:.2f} GB, GB/s, median of {ROUNDS} rounds; ratios to the plain way")
    for workers in (1, 2):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            results = kdist.launch(measure, workers, (folder, num_bytes), backend=backend, env=ENV)
            # The slowest worker counts.
            slowest = {name: [max(r[name][i] for r in results) for i in range(ROUNDS)] for name in results[0]}
            speed = {name: num_bytes / 1e9 / median(values) for name, values in slowest.items()}
            print(
                f"  {workers} worker(s): write {speed['write']:.2f}  save {speed['save']:.2f}  "
                f"ratio {speed['save'] / speed['write']:.2f}   read {speed['read']:.2f}  "
                f"restore {speed['restore']:.2f}  ratio {speed['restore'] / speed['read']:.2f}   "
                f"in the background: returns after {median(slowest['pause']):.2f} s, "
                f"done {median(slowest['behind']):.2f} s later",
                flush=True,
            )
    for workers in (1, 2):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            quiet, busy, pause = kdist.launch(
                measure_steps, workers, (folder, num_bytes), backend=backend, env=ENV
            )[0]
            print(
                f"  {workers} worker(s): {quiet * 1000:.2f} ms a step, {busy * 1000:.2f} ms during a save: "
                f"{100 * (busy / quiet - 1):+.1f} %; one step waits {pause * 1000:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
