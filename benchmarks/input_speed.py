"""How fast datasets of each kind pass through `fit`, and how long a step waits for them.

    python benchmarks/input_speed.py torch

Two figures for each kind of dataset, on 1 and 2 workers:

- rows per second through `fit` with an empty model, over those of the same pipeline iterated by hand (on two
  workers, each worker's own pipeline, at the same time on both);
- the share of a step of 10 ms that is spent waiting for its batch, which includes the workers' agreement.

Both come from the same processes, in several rounds one after the other; what is printed is the median.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import kdist

ROUNDS = 5
STEPS = 200
ROWS = 64  # of a per-replica batch
STEP_SECONDS = 0.01


def kinds() -> dict[str, Callable[[], Any]]:
    """Makes one pipeline of each kind: batches of 64 rows of 256 numbers."""
    import grain
    import keras
    import numpy as np
    import tensorflow as tf
    import torch

    x = np.random.RandomState(0).rand(STEPS * ROWS, 256).astype("float32")

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            return x[index * ROWS : (index + 1) * ROWS]

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, index: int) -> Any:
            return x[index]

    def generator() -> Iterator[Any]:
        for start in range(0, len(x), ROWS):
            yield x[start : start + ROWS]

    return {
        "tf.data": lambda: tf.data.Dataset.from_tensor_slices(x).batch(ROWS),
        "DataLoader": lambda: torch.utils.data.DataLoader(Rows(), batch_size=ROWS),
        "PyDataset": Batches,
        "Grain": lambda: grain.MapDataset.source(x).batch(ROWS),
        "generator function": lambda: generator,
        "NumPy": lambda: kdist.get_strategy().make_experimental_numpy_dataset(x).batch(ROWS),
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


def measure(kind: str) -> tuple[list[float], list[float]]:
    """Runs in every worker: the ratio of speeds and the share of waiting, a round each."""
    strategy = kdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = empty_model()
        pipeline = kinds()[kind]()
    distributed = strategy.distribute_datasets_from_function(lambda context: pipeline)

    def fit() -> float:
        start = time.perf_counter()
        model.fit(distributed, verbose=0)
        return time.perf_counter() - start

    def waiting() -> float:
        waited = 0.0
        begun = asked = time.perf_counter()
        for _ in iter(distributed).batches():
            waited += time.perf_counter() - asked
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
        return waited / (time.perf_counter() - begun)

    fit(), by_hand(pipeline)
    ratios = [by_hand(pipeline) / fit() for _ in range(ROUNDS)]
    return ratios, [waiting() for _ in range(2)]


def main(backend: str) -> None:
    from kdist.testing import WorkerPool

    print(f"{backend}: batches of {ROWS} rows of 256 numbers a replica")
    print(f"{'':20}{'workers':>8}{'rows/s over by hand':>22}{'waiting in 10 ms steps':>25}")
    for num_workers in (1, 2):
        for kind in ("tf.data", "DataLoader", "PyDataset", "Grain", "generator function", "NumPy"):
            with WorkerPool(num_workers, backend, timeout=300) as pool:
                results = pool.run(measure, kind, timeout=300)
            ratio = min(statistics.median(ratios) for ratios, _ in results)
            share = max(statistics.median(shares) for _, shares in results)
            print(f"{kind:20}{num_workers:>8}{ratio:>22.2f}{share:>25.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "jax")
