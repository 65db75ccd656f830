"""Throughput of each kind of dataset under `fit`, and time that a step waits for its batch, on 1 and 2 workers.

    python benchmarks/input_speed.py torch
    python benchmarks/input_speed.py jax --workers 2 --kinds Grain tf.data

For each kind of dataset, the benchmark prints three medians over several rounds:

- the rows per second of `fit` with an empty model, divided by the rows per second of a plain loop over the same
  pipeline. One pipeline scales and mirrors images (a few milliseconds per batch), the other applies typical
  augmentation. The slower of two workers counts;
- the time of a `fit` step with an empty model and slices of an array as input;
- the share of a 10 ms step that is spent waiting for the batch, including the agreement between workers, and the same
  share for a thread that reads the pipeline into a queue.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kdist

ROUNDS = 3
STEPS = 100
ROWS = 64  # in a per-replica batch
AUGMENTED_STEPS = 40
SIDE, SMALL_SIDE = 96, 32  # width and height of an image
STEP_SECONDS = 0.01


def prepare(images: Any) -> Any:
    """Applies minimal preprocessing: scales images to numbers around 0, and mirrors them."""
    import numpy as np

    scaled = (images.astype("float32") - 127.5) / 127.5
    return np.ascontiguousarray(scaled[..., ::-1, :])


def augment(images: Any) -> Any:
    """Applies typical augmentation: mirrors and blurs images, changes their contrast and colors, and clips them."""
    import numpy as np

    scaled = prepare(images)
    for axis in (-3, -2):
        scaled = (np.roll(scaled, 1, axis) + 2 * scaled + np.roll(scaled, -1, axis)) / 4
    mean = scaled.mean(axis=(-3, -2), keepdims=True)
    contrast = np.random.uniform(0.8, 1.2, mean.shape).astype("float32")
    return np.clip((scaled - mean) * contrast + mean, -1, 1)


def kinds(side: int = SIDE, augmented: bool = False, light: bool = False) -> dict[str, Callable[[], Any]]:
    """Returns a function per kind that creates a pipeline.

    Args:
        side: The width and height of the images.
        augmented: Whether images are augmented, or only scaled and mirrored.
        light: Whether batches are slices of an array, without preprocessing.
    """
    import grain
    import keras
    import numpy as np
    import tensorflow as tf
    import torch

    random = np.random.RandomState(0)
    steps = AUGMENTED_STEPS if augmented else STEPS
    if light:
        x = random.rand(steps * ROWS, 256).astype("float32")
    else:
        x = random.randint(0, 256, (steps * ROWS, side, side, 3)).astype("uint8")
    made = (lambda rows: rows) if light else augment if augmented else prepare

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            return made(x[index * ROWS : (index + 1) * ROWS])

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, index: int) -> Any:
            return made(x[index])

    def generator() -> Iterator[Any]:
        for start in range(0, len(x), ROWS):
            yield made(x[start : start + ROWS])

    def tf_data() -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(x)
        if not light:
            dataset = dataset.map(tf_augment if augmented else tf_prepare)
        return dataset.batch(ROWS)

    def tf_prepare(row: Any) -> Any:
        return tf.reverse(tf.cast(row, tf.float32) / 127.5 - 1.0, [1])

    def tf_augment(row: Any) -> Any:
        scaled = tf_prepare(row)
        for axis in (0, 1):
            scaled = (tf.roll(scaled, 1, axis) + 2.0 * scaled + tf.roll(scaled, -1, axis)) / 4.0
        mean = tf.reduce_mean(scaled, axis=(0, 1), keepdims=True)
        contrast = tf.random.uniform((1, 1, 3), 0.8, 1.2)
        return tf.clip_by_value((scaled - mean) * contrast + mean, -1.0, 1.0)

    def from_grain() -> Any:
        dataset = grain.MapDataset.source(x)
        return (dataset if light else dataset.map(made)).batch(ROWS)

    def from_arrays() -> Any:
        rows = x if light else made(x[: steps * ROWS // 4])
        return (
            kdist.get_strategy().make_experimental_numpy_dataset(rows).repeat(1 if light else 4).batch(ROWS)
        )

    return {
        "tf.data": tf_data,
        "DataLoader": lambda: torch.utils.data.DataLoader(Rows(), batch_size=ROWS),
        "PyDataset": Batches,
        "Grain": from_grain,
        "generator function": lambda: generator,
        "NumPy": from_arrays,
    }


def empty_model() -> Any:
    import keras

    class Empty(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, *arguments: Any) -> Any:
            # On JAX, a step also takes and returns the state.
            logs = {"loss": keras.ops.zeros(())}
            return (logs, arguments[0]) if len(arguments) > 1 else logs

    model = Empty()
    model.compile("sgd")
    return model


def iterated(dataset: Any) -> Iterator[Any]:
    """Returns the batches of a pipeline, without kdist."""
    batches = dataset() if callable(dataset) else dataset
    if hasattr(batches, "__getitem__") and hasattr(batches, "num_batches"):  # a PyDataset
        return map(batches.__getitem__, range(len(batches)))
    return iter(batches)


def by_hand(dataset: Any) -> float:
    start = time.perf_counter()
    assert sum(1 for _ in iterated(dataset)) in (STEPS, AUGMENTED_STEPS)
    return time.perf_counter() - start


def in_thread(dataset: Any) -> Iterator[Any]:
    """Yields the batches of a pipeline, and reads two in advance, as in typical code without kdist."""
    waiting: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        for batch in iterated(dataset):
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := waiting.get()) is not None:
        yield batch


def share_of_waiting(batches: Iterator[Any]) -> float:
    next(batches)
    waits = []
    asked = time.perf_counter()
    for _ in batches:
        waits.append(time.perf_counter() - asked)
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
    return sum(waits) / (sum(waits) + len(waits) * STEP_SECONDS)


def measure(kind: str) -> dict[str, list[float]]:
    """Runs in every worker: returns the results of each round. Times are in seconds per batch."""
    from kdist.backends.messages import gather

    strategy = _strategy()

    def distributed(pipeline: Any) -> Any:
        return strategy.distribute_datasets_from_function(lambda context: pipeline)

    def together(function: Callable[..., float], *args: Any) -> float:
        gather(strategy.runtime, None)  # all workers start at the same time
        return function(*args)

    def fit(model: Any, dataset: Any) -> float:
        start = time.perf_counter()
        model.fit(dataset, verbose=0)
        return time.perf_counter() - start

    figures: dict[str, list[float]] = {}
    with strategy.scope():
        pipelines = {
            "plain": (kinds()[kind](), STEPS),
            "augmented": (kinds(augmented=True)[kind](), AUGMENTED_STEPS),
        }
        light, small = kinds(light=True)[kind](), kinds(SMALL_SIDE)[kind]()
        models = {name: empty_model() for name in (*pipelines, "light")}
    for name, (pipeline, steps) in pipelines.items():
        ours = distributed(pipeline)
        fit(models[name], ours), by_hand(pipeline)
        for _ in range(ROUNDS):
            figures.setdefault(f"{name} by hand", []).append(together(by_hand, pipeline) / steps)
            figures.setdefault(f"{name} fit", []).append(together(fit, models[name], ours) / steps)
    ours = distributed(light)
    figures["step"] = [together(fit, models["light"], ours) / STEPS for _ in range(ROUNDS + 1)][1:]
    ours = distributed(small)
    for _ in range(ROUNDS):
        figures.setdefault("waiting", []).append(together(lambda: share_of_waiting(iter(ours).batches())))
        figures.setdefault("waiting in thread", []).append(
            together(lambda: share_of_waiting(in_thread(small)))
        )
    return figures


_strategies: list[Any] = []


def _strategy() -> Any:
    if not _strategies:
        _strategies.append(kdist.MultiWorkerMirroredStrategy())
    return _strategies[0]


KINDS = ("tf.data", "DataLoader", "PyDataset", "Grain", "generator function", "NumPy")


def main(arguments: Sequence[str]) -> None:
    from kdist.testing import WorkerPool

    parser = argparse.ArgumentParser(description="How fast datasets pass through fit.")
    parser.add_argument("backend", nargs="?", default="jax", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options = parser.parse_args(arguments)
    print(f"{options.backend}: batches of {ROWS} images of {SIDE} x {SIDE} x 3 a replica")
    heads = (
        "workers",
        "by hand",
        "fit/by hand",
        "augmented",
        "fit/by hand",
        "empty step",
        "waiting",
        "in thread",
    )
    print(f"{'':20}" + "".join(f"{head:>13}" for head in heads))
    for num_workers in options.workers:
        with WorkerPool(num_workers, options.backend, timeout=250) as pool:
            for kind in options.kinds:
                workers = pool.run(measure, kind, timeout=250)
                # The slowest worker of each round counts.
                rounds = {
                    key: [max(values) for values in zip(*(worker[key] for worker in workers), strict=True)]
                    for key in workers[0]
                }
                print(_line(kind, num_workers, rounds), flush=True)


def _line(kind: str, num_workers: int, rounds: dict[str, list[float]]) -> str:
    def milliseconds(key: str) -> str:
        return f"{statistics.median(rounds[key]) * 1e3:.2f} ms"

    def ratio(name: str) -> str:
        pairs = zip(rounds[f"{name} by hand"], rounds[f"{name} fit"], strict=True)
        return f"{statistics.median(hand / fit for hand, fit in pairs):.2f}"

    cells = [str(num_workers)]
    for name in ("plain", "augmented"):
        cells += [milliseconds(f"{name} by hand"), ratio(name)]
    cells.append(milliseconds("step"))
    cells += [f"{statistics.median(rounds[key]):.1%}" for key in ("waiting", "waiting in thread")]
    return f"{kind:20}" + "".join(f"{cell:>13}" for cell in cells)


if __name__ == "__main__":
    main(sys.argv[1:])
