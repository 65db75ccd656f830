"""Step time of `fit` with two workers, divided by other ways to train the same model.

    python benchmarks/over_loops.py torch|jax|tensorflow [rounds]

On PyTorch, kdist is compared with `DistributedDataParallel`, and with Accelerate and Fabric if they are installed. If
you set `COMING_KERAS`, it is also compared with `keras.distribution.DataParallel` of Keras nightly. The variable is the
directory of `pip install --pre --no-deps --target DIRECTORY keras-nightly`. On JAX, kdist is compared with two kinds of
`jit`, and on TensorFlow with `fit` of Keras 2 (the package tf-keras).

Each round runs a job with kdist and a job per contender, one after another, for three models of equal shapes: a
small MLP (0.01 M parameters), a wide MLP (2.9 M) and a CNN. Each worker has one thread. The result is the median ratio
of all rounds, with the lowest and the highest.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROWS = 128  # in a global batch
STEPS = {"small": 300, "wide": 60, "cnn": 60}
WIDTHS = {"small": (64, 128, 10), "wide": (256, 1024, 1024, 1024, 512, 10)}
EPOCHS = 5
# The contenders on each backend, and the package that each of them needs.
LOOPS = {
    "torch": {"ddp": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric", "keras": "keras"},
    "jax": {"jit": "jax", "fused": "jax"},
    "tensorflow": {"keras2": "tf_keras"},
}


def with_kdist(name: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch with `fit`."""
    import keras

    import kdist

    return with_fit(name, kdist.MultiWorkerMirroredStrategy(), keras)


def with_keras(name: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch with `fit` under the data parallelism of the nightly Keras."""
    import keras

    keras.distribution.initialize()
    strategy = keras.distribution.DataParallel(auto_shard_dataset=False)
    return with_fit(name, strategy, keras, num_parts=2)


def with_keras2(name: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch with `fit` of Keras 2 under TensorFlow's own strategy."""
    import tensorflow as tf
    import tf_keras

    port = int(os.environ["MASTER_PORT"])
    cluster = {"worker": [f"localhost:{port + 1}", f"localhost:{port + 2}"]}
    task = {"type": "worker", "index": int(os.environ["RANK"])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return with_fit(name, tf.distribute.MultiWorkerMirroredStrategy(), tf_keras)


def with_fit(name: str, strategy: Any, keras: Any, num_parts: int = 1) -> Callable[[], Any]:
    """Returns a function that trains an epoch with `fit` of Keras 2 or Keras 3, on one of `num_parts` parts."""
    import numpy as np

    layers = keras.layers
    with strategy.scope():
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
    random, rows = np.random.default_rng(0), ROWS // num_parts
    count = rows * STEPS[name]
    x, y = random.random((count, *shape), dtype="float32"), random.integers(0, 10, count)
    return lambda: model.fit(x, y, batch_size=rows, verbose=0)


def with_torch(name: str, kind: str) -> Callable[[], Any]:
    """Returns a function that trains an epoch of `torch.nn` modules with DDP, Accelerate, Fabric or `"alone"`."""
    import torch
    from torch import nn

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
    model: Any = nn.Sequential(*inner)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    backward: Callable[[Any], None] = torch.Tensor.backward
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    elif kind == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    rows = ROWS // 2
    x, y = torch.rand(rows * STEPS[name], *shape), torch.randint(0, 10, (rows * STEPS[name],))

    def epoch() -> None:
        total = torch.zeros(())
        for i in range(STEPS[name]):
            part = slice(i * rows, (i + 1) * rows)
            optimizer.zero_grad()
            value = loss(model(x[part]), y[part])
            backward(value)
            optimizer.step()
            total += value.detach()

    return epoch


def with_jit(name: str, is_fused: bool) -> Callable[[], Any]:
    """Returns a function that trains an epoch with one jitted program per step.

    Either XLA divides the program, or each device computes its rows and sums one flat array.
    """
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    jax.distributed.initialize(address, 2, int(os.environ["RANK"]))
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    equal, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    random = np.random.default_rng(0)
    is_cnn = name == "cnn"
    shape = (28, 28, 1) if is_cnn else WIDTHS[name][:1]
    sizes: list[tuple[int, ...]] = [(3, 3, 1, 16), (3, 3, 16, 32), (800, 10)]
    if not is_cnn:
        sizes = list(zip(WIDTHS[name], WIDTHS[name][1:], strict=False))
    weights = [(random.normal(0, 0.05, s).astype("float32"), np.zeros(s[-1], "float32")) for s in sizes]
    weights = jax.tree.map(lambda a: jax.make_array_from_process_local_data(equal, a, a.shape), weights)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for i, (kernel, bias) in enumerate(weights):
            if kernel.ndim == 4:
                numbers = ("NHWC", "HWIO", "NHWC")
                x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers)
                window = (1, 2, 2, 1)
                x = lax.reduce_window(jax.nn.relu(x + bias), -jnp.inf, lax.max, window, window, "VALID")
            else:
                x = x.reshape(x.shape[0], -1) @ kernel + bias
                x = x if i == len(weights) - 1 else jax.nn.relu(x)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1)) / ROWS

    def step(weights: Any, total: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        if is_fused:
            flat, restore = ravel_pytree((value, gradients))
            value, gradients = restore(lax.psum(flat, "batch"))
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), total + value

    if is_fused:
        whole, rows_of = PartitionSpec(), PartitionSpec("batch")
        specs = (whole, whole, rows_of, rows_of)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    program = jax.jit(step, donate_argnums=0, out_shardings=equal)
    rows = ROWS // 2
    count = rows * STEPS[name]
    x, y = random.random((count, *shape), dtype="float32"), random.integers(0, 10, count).astype("int32")

    def epoch() -> None:
        nonlocal weights
        total = jax.make_array_from_process_local_data(equal, np.float32(0), ())
        for i in range(STEPS[name]):
            part = slice(i * rows, (i + 1) * rows)
            batch = [jax.make_array_from_process_local_data(by_rows, a[part]) for a in (x, y)]
            weights, total = program(weights, total, *batch)
        jax.block_until_ready(total)

    return epoch


def run_worker(kind: str, name: str) -> None:
    """Prints the milliseconds per step in the fastest epoch."""
    in_torch = {kind: functools.partial(with_torch, kind=kind) for kind in LOOPS["torch"]}
    in_jax = {kind: functools.partial(with_jit, is_fused=kind == "fused") for kind in LOOPS["jax"]}
    with_keras_only = {"kdist": with_kdist, "keras": with_keras, "keras2": with_keras2}
    makers: dict[str, Callable[[str], Callable[[], Any]]] = {**in_torch, **in_jax, **with_keras_only}
    found = milliseconds(makers[kind](name), name)
    if os.environ["RANK"] == "0":
        print("milliseconds", found, flush=True)
    if kind in in_torch:
        os._exit(0)  # gloo's threads sometimes abort the process at its normal end


def milliseconds(epoch: Callable[[], Any], name: str) -> float:
    """Returns the milliseconds per step in the fastest epoch. The first epoch compiles and does not count."""
    epoch()
    times = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        epoch()
        times.append(time.perf_counter() - start)
    return min(times) / STEPS[name] * 1000


def run_job(backend: str, kind: str, name: str) -> float:
    """Returns the milliseconds per step of a job with two workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one_thread = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    one_thread |= {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    paths = {"PYTHONPATH": os.environ["COMING_KERAS"]} if kind == "keras" else {}
    done = subprocess.run(
        [*command, __file__, "worker", kind, name],
        env=os.environ | one_thread | paths | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split("milliseconds")[1])


def main(backend: str, rounds: int) -> None:
    loops = [kind for kind, package in LOOPS[backend].items() if importlib.util.find_spec(package)]
    loops = [kind for kind in loops if kind != "keras" or "COMING_KERAS" in os.environ]
    kinds = ("kdist", *loops)
    for name in STEPS:
        times = [[run_job(backend, kind, name) for kind in kinds] for _ in range(rounds)]
        for i, loop in enumerate(loops, 1):
            ratios = sorted(each[0] / each[i] for each in times)
            ours, theirs = (statistics.median(each[j] for each in times) for j in (0, i))
            print(
                f"{name:6} kdist {ours:6.2f} ms   {loop} {theirs:6.2f} ms   "
                f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        run_worker(*sys.argv[2:])
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
