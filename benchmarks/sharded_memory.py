"""Memory for weights and optimizer state per device under `FullyShardedStrategy`, divided by mirrored training.

    python benchmarks/sharded_memory.py jax

A transformer block and an MLP train a few steps with Adam under both strategies, on 2 and on 4 replicas: devices of one
process on JAX, workers on PyTorch. The benchmark counts the bytes of all arrays on one device after the last step.
"""

from __future__ import annotations

import sys
from typing import Any

ROWS = 32


def mlp() -> Any:
    import keras

    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(10)])


def transformer() -> Any:
    import keras

    layers = keras.layers
    inputs = keras.Input((16, 128))
    x = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(4, 32)(inputs, inputs))
    x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, activation="gelu")(x)))
    return keras.Model(inputs, layers.Dense(10)(x))


MODELS = {"MLP (0.6 M parameters)": mlp, "block of a transformer (0.2 M parameters)": transformer}


def held(value: Any) -> int:
    """Returns the bytes of an array on one device."""
    if hasattr(value, "addressable_shards"):  # a JAX array
        first = min(value.sharding.addressable_devices, key=lambda device: device.id)
        return sum(shard.data.nbytes for shard in value.addressable_shards if shard.device == first)
    local = value.to_local() if hasattr(value, "to_local") else value  # a PyTorch tensor
    return int(local.numel() * local.element_size())


def measure(name: str, devices: int) -> list[int]:
    """Runs in every worker: returns the bytes on its first device, mirrored and sharded."""
    import keras
    import numpy as np

    import kdist

    names = [f"cpu:{i}" for i in range(devices)]
    found = []
    for kind in (kdist.MultiWorkerMirroredStrategy, kdist.FullyShardedStrategy):
        keras.utils.set_random_seed(0)
        with kind(devices=names).scope():
            model = MODELS[name]()
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x = np.random.RandomState(0).rand(ROWS, *model.input_shape[1:]).astype("float32")
        y = np.zeros((ROWS, *model.output_shape[1:-1]), "int32")
        model.fit(x, y, batch_size=ROWS // 2, verbose=0)
        variables = {id(v): v for v in (*model.variables, *model.optimizer.variables)}
        found.append(sum(held(variable.value) for variable in variables.values()))
    return found


def main(backend: str) -> None:
    """Prints one line per model and number of replicas."""
    from kdist.testing import WorkerPool

    for replicas in (2, 4):
        workers, devices = (1, replicas) if backend == "jax" else (replicas, 1)
        for name in MODELS:
            with WorkerPool(workers, backend) as pool:
                results = pool.run(measure, name, devices)
            share = max(divided / mirrored for mirrored, divided in results)
            sizes = " and ".join(f"{size / 2**20:.2f} MiB" for size in results[0])
            print(
                f"{backend}, {replicas} replicas, {name}: {share:.3f} of the mirrored one's ({sizes})",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
