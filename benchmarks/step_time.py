"""Step time of kdist's `fit`, divided by the step time of a hand-written native loop, on 1 and 2 workers.

    python benchmarks/step_time.py jax

Both loops train the same Keras model on the same batches. The result is the median ratio over all rounds. The baselines
are a jitted step over a mesh (JAX), `tf.distribute` with a `GradientTape` (TensorFlow), and `DistributedDataParallel`
with a `torch.optim` optimizer (PyTorch). On one worker, the baseline has no communication.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import kdist

ROUNDS = 5
STEPS = 15
ROWS = 128  # in a global batch


def mlp(width: int, depth: int) -> tuple[Any, tuple[int, ...]]:
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.layers.Input((784,)), *hidden, keras.layers.Dense(10)]), (784,)


def cnn() -> tuple[Any, tuple[int, ...]]:
    import keras

    layers = [
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.layers.Input((28, 28, 1)), *layers]), (28, 28, 1)


MODELS = {
    "small MLP (0.1 M parameters)": lambda: mlp(128, 2),
    "large MLP (2.9 M parameters)": lambda: mlp(1024, 3),
    "CNN": cnn,
}


def measure(name: str) -> list[tuple[float, float]]:
    """Runs in every worker: returns the seconds per step of `fit` and of the native loop, per round."""
    import keras
    import numpy as np

    strategy = kdist.MultiWorkerMirroredStrategy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, shape = MODELS[name]()
        model.compile(keras.optimizers.Adam(1e-3), loss)
    random = np.random.RandomState(0)
    x = random.rand(STEPS * ROWS, *shape).astype("float32")
    y = random.randint(0, 10, STEPS * ROWS).astype("int32")

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds = (time.perf_counter() - self.start) / STEPS

    def fit() -> float:
        clock = Clock()
        model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    native = NATIVE[keras.backend.backend()](strategy, *MODELS[name](), loss, x, y)
    fit(), native()
    return [(fit(), native()) for _ in range(ROUNDS)]


def _share(strategy: Any, array: Any, step: int) -> Any:
    runtime = strategy.runtime
    size = ROWS // runtime.num_workers
    start = step * ROWS + runtime.worker_index * size
    return array[start : start + size]


def native_torch(strategy: Any, model: Any, shape: Any, loss: Any, x: Any, y: Any) -> Any:
    import torch

    parallel = model
    if strategy.runtime.num_workers > 1:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def run() -> float:
        start = time.perf_counter()
        for step in range(STEPS):
            rows = torch.from_numpy(_share(strategy, x, step))
            labels = torch.from_numpy(_share(strategy, y, step)).long()
            optimizer.zero_grad()
            value = torch.nn.functional.cross_entropy(parallel(rows), labels)
            value.backward()
            optimizer.step()
            value.item()
        return (time.perf_counter() - start) / STEPS

    return run


def native_jax(
    strategy: Any, model: Any, shape: Any, loss: Any, x: Any, y: Any, flat_sum: bool = False
) -> Any:
    """Returns a loop with a jitted step over a mesh. With `flat_sum`, `shard_map` sums all gradients as one array."""
    import jax
    import keras
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole, split = PartitionSpec(), PartitionSpec("batch")
    mapped = flat_sum and mesh.size > 1
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def step(trainable: Any, slots: Any, batch: Any, labels: Any) -> Any:
        def compute(trainable: Any) -> Any:
            predicted, _ = model.stateless_call(trainable, [], batch, training=True)
            return loss(labels, predicted)

        value, gradients = jax.value_and_grad(compute)(trainable)
        if mapped:
            flat, unravel = ravel_pytree(gradients)
            gradients = unravel(jax.lax.psum(flat, "batch"))
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, trainable, slots

    if mapped:
        specs = {"in_specs": (whole, whole, split, split), "out_specs": whole, "check_vma": False}
        step = jax.shard_map(step, mesh=mesh, **specs)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=NamedSharding(mesh, whole))

    def place(spec: Any, array: Any) -> Any:
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    state = [
        [place(whole, v.value) for v in part] for part in (model.trainable_variables, optimizer.variables)
    ]

    def run() -> float:
        start = time.perf_counter()
        for i in range(STEPS):
            part = slice(i * ROWS, (i + 1) * ROWS)
            value, *state[:] = jitted(*state, place(split, x[part]), place(split, y[part]))
            float(value)
        return (time.perf_counter() - start) / STEPS

    return run


def native_tensorflow(strategy: Any, model: Any, shape: Any, loss: Any, x: Any, y: Any) -> Any:
    import keras
    import tensorflow as tf

    native = strategy.runtime.native
    with native.scope():
        model = keras.models.clone_model(model)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    @tf.autograph.experimental.do_not_convert
    def replica(batch: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(batch, training=True))  # Keras divides it by the number of replicas
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    @tf.function(autograph=False)
    def step(batch: Any, labels: Any) -> Any:
        return native.run(replica, args=(batch, labels))

    def run() -> float:
        start = time.perf_counter()
        for i in range(STEPS):
            value = step(tf.constant(_share(strategy, x, i)), tf.constant(_share(strategy, y, i)))
            native.experimental_local_results(value)[0].numpy()
        return (time.perf_counter() - start) / STEPS

    return run


NATIVE = {"torch": native_torch, "jax": native_jax, "tensorflow": native_tensorflow}


def main() -> None:
    """Prints a row per model and number of workers."""
    from statistics import median

    backend = sys.argv[1]
    print(
        f"{backend}: milliseconds a step, global batches of {ROWS} rows, median of {ROUNDS} rounds of {STEPS} steps"
    )
    print(f"{'model':32}{'workers':>8}{'fit':>10}{'native':>10}{'ratio':>8}")
    for name in MODELS:
        for workers in (1, 2):
            env = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
            rounds = kdist.launch(measure, num_workers=workers, args=(name,), backend=backend, env=env)[0]
            fit, native = (median(r[i] for r in rounds) * 1e3 for i in (0, 1))
            ratio = median(a / b for a, b in rounds)
            print(f"{name:32}{workers:8}{fit:10.1f}{native:10.1f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
