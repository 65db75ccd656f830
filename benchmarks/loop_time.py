"""Step time of a custom loop on kdist, divided by the step time of a native loop, on 1 and 2 workers.

    python benchmarks/loop_time.py jax

The kdist loop consists of `kdist.function`, `strategy.run`, `kdist.value_and_grad` and a Keras optimizer. The baselines
are `jit` of a `shard_map` that sums flat gradients (JAX), `tf.function` around `tf.distribute`'s `run` (TensorFlow) and
`DistributedDataParallel` with PyTorch's Adam. All use the same Keras model and batches in memory.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from step_time import ROUNDS, ROWS, STEPS, _share, mlp, native_jax, native_tensorflow, native_torch

import kdist

WIDTH, DEPTH = 512, 3  # a step of about 5 ms on one core


def measure() -> list[tuple[float, float]]:
    """Runs in every worker: returns the seconds per step of the kdist loop and of the native loop, per round."""
    import keras
    import numpy as np

    strategy = kdist.MultiWorkerMirroredStrategy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, shape = mlp(WIDTH, DEPTH)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    random = np.random.RandomState(0)
    x = random.rand(STEPS * ROWS, *shape).astype("float32")
    y = random.randint(0, 10, STEPS * ROWS).astype("int32")

    def replica_step(images: Any, labels: Any) -> Any:
        def compute() -> Any:
            return loss(labels, model(images, training=True))

        value, gradients = kdist.value_and_grad(compute, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @kdist.function
    def train_step(images: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(images, labels))

    def portable() -> float:
        start = time.perf_counter()
        for step in range(STEPS):
            images, labels = (keras.ops.convert_to_tensor(_share(strategy, array, step)) for array in (x, y))
            float(keras.ops.convert_to_numpy(train_step(images, labels)))
        return (time.perf_counter() - start) / STEPS

    native = NATIVE[keras.backend.backend()](strategy, *mlp(WIDTH, DEPTH), loss, x, y)
    portable(), native()
    return [(portable(), native()) for _ in range(ROUNDS)]


NATIVE = {
    "torch": native_torch,
    "jax": functools.partial(native_jax, flat_sum=True),
    "tensorflow": native_tensorflow,
}


def main() -> None:
    """Prints a row per number of workers."""
    from statistics import median

    backend = sys.argv[1] if len(sys.argv) > 1 else "jax"
    print(f"{backend}: milliseconds a step, global batches of {ROWS} rows, median of {ROUNDS} rounds")
    print(f"{'workers':>8}{'kdist':>10}{'native':>10}{'ratio':>8}")
    for workers in (1, 2):
        env = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        rounds = kdist.launch(measure, num_workers=workers, backend=backend, env=env)[0]
        ours, native = (median(r[i] for r in rounds) * 1e3 for i in (0, 1))
        print(f"{workers:8}{ours:10.1f}{native:10.1f}{median(a / b for a, b in rounds):8.2f}", flush=True)


if __name__ == "__main__":
    main()
