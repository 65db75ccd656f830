"""How fast datasets of each kind pass through `fit`, and how long a step waits for them.

    python benchmarks/input_speed.py torch
    python benchmarks/input_speed.py jax --workers 2 --kinds Grain tf.data

Figures for each kind of dataset, on 1 and 2 workers:

- rows per second through `fit` with an empty model, over those of the same pipeline iterated by hand. On two
  workers both iterate at the same time, by hand as in `fit`, with as many threads, and the slower one counts. The
  pipeline prepares images: a few milliseconds a batch, given beside;
- what a step of `fit` with an empty model takes where the pipeline takes next to nothing: batches cut from an
  array;
- the share of a step of 10 ms that is spent waiting for its batch of images, which includes the workers'
  agreement.

All come from the same processes, in several rounds one after the other; what is printed is the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kdist

ROUNDS = 3
STEPS = 100
ROWS = 64  # of a per-replica batch
SIDE = 96  # of an image
STEP_SECONDS = 0.01


def prepare(images: Any) -> Any:
    """What users do with images: numbers around 0, every other one mirrored."""
    import numpy as np

    scaled = (images.astype("float32") - 127.5) / 127.5
    return np.ascontiguousarray(scaled[..., ::-1, :]) if images.ndim == 4 else scaled[:, ::-1, :].copy()


def kinds(light: bool = False) -> dict[str, Callable[[], Any]]:
    """Makes one pipeline of each kind.

    Args:
        light: Whether batches are cut from an array as they are, instead of prepared from images.
    """
    import grain
    import keras
    import numpy as np
    import tensorflow as tf
    import torch

    random = np.random.RandomState(0)
    if light:
        x = random.rand(STEPS * ROWS, 256).astype("float32")
    else:
        x = random.randint(0, 256, (STEPS * ROWS, SIDE, SIDE, 3)).astype("uint8")

    def made(rows: Any) -> Any:
        return rows if light else prepare(rows)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return STEPS

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
            dataset = dataset.map(lambda row: tf.reverse(tf.cast(row, tf.float32) / 127.5 - 1.0, [1]))
        return dataset.batch(ROWS)

    def from_grain() -> Any:
        dataset = grain.MapDataset.source(x)
        return (dataset if light else dataset.map(prepare)).batch(ROWS)

    def from_arrays() -> Any:
        rows = x if light else prepare(x[: STEPS * ROWS // 4])
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
            # On JAX a step takes and returns the state, too.
            logs = {"loss": keras.ops.zeros(())}
            return (logs, arguments[0]) if len(arguments) > 1 else logs

    model = Empty()
    model.compile("sgd")
    return model


def by_hand(dataset: Any) -> float:
    start = time.perf_counter()
    batches = dataset() if callable(dataset) else dataset
    if hasattr(batches, "__getitem__") and hasattr(batches, "num_batches"):  # a PyDataset
        batches = map(batches.__getitem__, range(len(batches)))
    count = sum(1 for _ in batches)
    assert count == STEPS
    return time.perf_counter() - start


def measure(kind: str) -> tuple[list[float], list[float], float, list[float]]:
    """Runs in every worker: seconds by hand and in `fit` a round, of an empty step, and the shares of waiting."""
    from kdist.backends.messages import gather

    strategy = _strategy()
    with strategy.scope():
        model, empty = empty_model(), empty_model()
        pipeline, light = kinds()[kind](), kinds(light=True)[kind]()
    distributed, light = (
        strategy.distribute_datasets_from_function(lambda context, p=p: p) for p in (pipeline, light)
    )

    def together(function: Callable[..., float], *args: Any) -> float:
        gather(strategy.runtime, None)  # all begin at the same time
        return function(*args)

    def fit(model: Any, dataset: Any) -> float:
        start = time.perf_counter()
        model.fit(dataset, verbose=0)
        return time.perf_counter() - start

    def waiting() -> float:
        waited = 0.0
        begun = asked = time.perf_counter()
        for _ in iter(distributed).batches():
            waited += time.perf_counter() - asked
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
        return waited / (time.perf_counter() - begun)

    fit(model, distributed), by_hand(pipeline), fit(empty, light)
    rounds = [(together(by_hand, pipeline), together(fit, model, distributed)) for _ in range(ROUNDS)]
    step = min(fit(empty, light) for _ in range(ROUNDS)) / STEPS
    hand, fitted = ([pair[i] for pair in rounds] for i in range(2))
    return hand, fitted, step, [together(waiting) for _ in range(2)]


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
    print(
        f"{'':20}{'workers':>8}{'by hand':>12}{'fit over by hand':>18}{'empty step':>14}{'waiting in 10 ms':>18}"
    )
    for num_workers in options.workers:
        with WorkerPool(num_workers, options.backend, timeout=250) as pool:
            for kind in options.kinds:
                results = pool.run(measure, kind, timeout=250)
                # The slowest worker of each round.
                hand, fitted = (
                    [max(times) for times in zip(*(r[i] for r in results), strict=True)] for i in (0, 1)
                )
                ratio = statistics.median(h / f for h, f in zip(hand, fitted, strict=True))
                batch = statistics.median(hand) / STEPS * 1e3
                step = max(r[2] for r in results) * 1e3
                share = max(statistics.median(r[3]) for r in results)
                print(
                    f"{kind:20}{num_workers:>8}{batch:>9.2f} ms{ratio:>18.2f}{step:>11.2f} ms{share:>18.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
