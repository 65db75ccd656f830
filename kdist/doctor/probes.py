"""Checks that workers run together after joining. All workers must call the functions in the same order.

The last one is the parity check of `kdist test`: one step of a small model on one device and on all workers.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdist.doctor.report import FAIL, OK, REPORT_BUG, Line
from kdist.parity import ATOL, RTOL, Training, explain, train
from kdist.whole_files import whole_file

Exchange = Callable[[Any], list[Any]]  # returns the values of all workers, in order

_ROUNDS = 5
_PATIENCE = 3.0  # seconds until a file must be visible on the other machines
_REPLACEMENTS = 50
_LARGE = 2 << 20  # float32 values: 8 MB
_ROWS = 23  # a prime, so the workers cannot share the rows evenly


def clock_offsets(exchange: Exchange, now: Callable[[], float] = time.time) -> list[tuple[float, float]]:
    """Returns the seconds by which each worker's clock is ahead of this one, and the uncertainty."""
    best: list[tuple[float, float]] | None = None
    for _ in range(_ROUNDS):
        exchange(0.0)  # synchronizes the workers
        before, start = now(), time.monotonic()
        theirs = exchange(before)
        doubt = time.monotonic() - start
        if best is None or doubt < best[0][1]:
            best = [(there - before, doubt) for there in theirs]
    assert best is not None
    return best


def shared_folder(folder: str, worker_index: int, exchange: Exchange) -> list[str]:
    """Checks a directory that all workers share. Returns one problem per worker, "" if there is none."""
    job = exchange(os.urandom(4).hex())[0]
    mine = Path(folder) / f".kdist-doctor-{job}-{worker_index}"
    problem = _write(mine, str(worker_index))
    everyone = exchange(problem)
    if not any(everyone):
        names = [mine.with_name(f".kdist-doctor-{job}-{i}") for i in range(len(everyone))]
        problem = _missing(names)
        everyone = exchange(problem)
    if not any(everyone):
        # Worker 0 replaces its file repeatedly while the others read it.
        problem = _replace(mine) if worker_index == 0 else _torn(mine.with_name(f".kdist-doctor-{job}-0"))
        everyone = exchange(problem)
    with contextlib.suppress(OSError):
        mine.unlink()
    return everyone


def _write(path: Path, text: str) -> str:
    try:
        with whole_file(path) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def _missing(names: list[Path]) -> str:
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = [index for index, name in enumerate(names) if _read(name) != str(index)]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return f"the files of {', '.join(f'worker {index}' for index in left)} are not visible" if left else ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None


def _replace(path: Path) -> str:
    for number in range(_REPLACEMENTS):
        if problem := _write(path, "ab"[number % 2] * 5000):
            return problem
    return ""


def _torn(path: Path) -> str:
    for _ in range(_REPLACEMENTS):
        said = _read(path)
        if said not in (None, "0", "a" * 5000, "b" * 5000):  # None: on NFS, it may be missing for a moment
            return "a file is incomplete while it is replaced"
    return ""


def all_reduce_times(strategy: Any) -> tuple[list[float], int, bool]:
    """Runs an all-reduce of a single number and of a large array over all replicas.

    Returns both times in seconds, the bytes of the large array, and whether the sums were correct.
    """
    import keras
    import numpy as np

    import kdist

    def add_up(values: Any) -> Any:
        context: Any = kdist.get_replica_context()
        weight = keras.ops.cast(context.replica_id_in_sync_group, "float32") + 1.0
        return context.all_reduce("SUM", values * weight)

    @kdist.function  # TensorFlow warns about functions that are not compiled
    def step(values: Any) -> Any:
        return strategy.run(add_up, args=(values,))

    count = strategy.num_replicas_in_sync
    times, is_right = [], True
    for number in (1, _LARGE):
        values = keras.ops.ones((number,), "float32")
        taken = []
        for _ in range(_ROUNDS + 1):  # the first round compiles
            start = time.perf_counter()
            result = strategy.experimental_local_results(step(values))[0]
            host = keras.ops.convert_to_numpy(result)
            taken.append(time.perf_counter() - start)
        is_right = is_right and bool(np.all(host == count * (count + 1) / 2))
        times.append(statistics.median(taken[1:]))
    return times, _LARGE * 4, is_right


def make_model() -> Any:
    """Returns a small model that covers all values that are summed over the replicas."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def rows() -> tuple[Any, Any, Any]:
    """Returns the training data. All rows and all sample weights are different."""
    import numpy as np

    draw = np.random.RandomState(0)
    x = draw.normal(size=(_ROWS, 8)).astype("float32")
    return x, draw.randint(4, size=_ROWS), np.linspace(0.5, 2, _ROWS).astype("float32")


def train_it(make_strategy: Callable[[], Any] | None) -> Training:
    return train(make_model, rows, make_strategy, 1, 0, {"batch_size": _ROWS})


def compare_step(expected: Training | None, strategy: Any, exchange: Exchange) -> Line | None:
    """Trains the model on all workers. Workers with `expected` return the result of the comparison."""
    mine = train_it(lambda: strategy)
    everyone = exchange(mine.numbers)
    if expected is None:
        return None
    workers = [Training(mine.title, mine.num_replicas, numbers, ()) for numbers in everyone]
    message = explain(expected, workers, RTOL, ATOL)
    if message is not None:
        return Line(FAIL, "one step", message, *REPORT_BUG)
    return Line(OK, "one step", f"{mine.num_replicas} replicas match one device")
