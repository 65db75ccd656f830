"""Tries each capability of every strategy on every backend, with a model whose numbers are computed by hand.

`python -m tests.contract.support RESULTS PAGE` writes the page of the docs from the results of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kdist import unsupported

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
# Each strategy, with its number of workers in the tests.
STRATEGIES = {
    "OneDeviceStrategy": 1,
    "MirroredStrategy": 1,
    "experimental.CentralStorageStrategy": 1,
    "MultiWorkerMirroredStrategy": 2,
    "TPUStrategy": 1,
    "FullyShardedStrategy": 2,
    "ModelParallelStrategy": 2,
    "KerasDistributionStrategy": 1,
}
ROWS, BATCH, RATE = 12, 5, 0.1
X = np.random.RandomState(5).randn(ROWS, 4).astype("float32")
Y = np.random.RandomState(6).randn(ROWS, 1).astype("float32")
START = np.array([[0.5], [-1.0], [0.25], [2.0]], "float32")

_functions: dict[str, Callable[[Any, str], None]] = {}


def make_strategy(name: str) -> Any:
    """Returns a strategy on two CPU devices of this process, or on one device of each of its workers."""
    import keras

    import kdist
    from kdist.cluster_resolver import TPUClusterResolver

    two = ["cpu:0", "cpu:1"]
    one_host = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    return {
        "OneDeviceStrategy": lambda: kdist.OneDeviceStrategy("cpu:0"),
        "MirroredStrategy": lambda: kdist.MirroredStrategy(two),
        "experimental.CentralStorageStrategy": lambda: kdist.experimental.CentralStorageStrategy(
            two, "cpu:0"
        ),
        "MultiWorkerMirroredStrategy": kdist.MultiWorkerMirroredStrategy,
        "TPUStrategy": lambda: kdist.TPUStrategy(TPUClusterResolver(environ=one_host), devices=two),
        "FullyShardedStrategy": lambda: kdist.FullyShardedStrategy(min_size=2),
        "ModelParallelStrategy": lambda: kdist.ModelParallelStrategy(
            {".*/kernel": ("model", None)}, mesh={"batch": 1, "model": 2}
        ),
        "KerasDistributionStrategy": lambda: kdist.KerasDistributionStrategy(
            keras.distribution.DataParallel(devices=two)
        ),
    }[name]()


def run_all(name: str, folder: str) -> dict[str, str]:
    """Tries all capabilities of a strategy.

    Args:
        name: The name of the strategy in `kdist`.
        folder: A directory for files, the same for all workers.

    Returns: A result for each key of `unsupported.CAPABILITIES`: "passed", "gap" for a declared gap with the right
        error, or the problem.
    """
    import keras

    from kdist.errors import UnsupportedError

    backend = keras.backend.backend()
    class_name = name.rpartition(".")[2]
    try:
        strategy = make_strategy(name)
    except UnsupportedError:
        return dict.fromkeys(
            _functions, "gap" if unsupported.find(class_name, backend, "create") else "undeclared"
        )
    results = {}
    for capability, function in _functions.items():
        declared = unsupported.find(class_name, backend, capability)
        try:
            function(strategy, os.path.join(folder, capability))
            results[capability] = "passed" if declared is None else "passed, in spite of its gap"
        except UnsupportedError:
            results[capability] = "gap" if declared else "undeclared"
        except Exception as error:
            results[capability] = f"{type(error).__name__}: {error}"
    return results


def _capability(function: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    name = function.__name__.strip("_")
    assert name in unsupported.CAPABILITIES
    _functions[name] = function
    return function


def _batches(size: int = BATCH) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, ROWS, size):
        yield X[start : start + size], Y[start : start + size]


def _trained(batches: Any) -> np.ndarray:
    """Computes the weights by hand, after a step of gradient descent per batch."""
    weights = START.astype("float64")
    for x, y in batches:
        weights = weights - RATE * 2 * x.T @ (x @ weights - y) / len(x)
    return weights


def _model(strategy: Any) -> Any:
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.set_weights([START])
    return model


def _same(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def _check_fit(strategy: Any, data: Any, expected: Any = None, **arguments: Any) -> Any:
    model = _model(strategy)
    model.fit(data, verbose=0, **arguments)
    _same(model.get_weights()[0], _trained(_batches()) if expected is None else expected)
    return model


@_capability
def _fit(strategy: Any, folder: str) -> None:
    _check_fit(strategy, X, y=Y, batch_size=BATCH, shuffle=False)


@_capability
def _evaluate(strategy: Any, folder: str) -> None:
    loss = _model(strategy).evaluate(X, Y, batch_size=BATCH, verbose=0)
    _same(loss, np.mean((X @ START - Y) ** 2))


@_capability
def _predict(strategy: Any, folder: str) -> None:
    _same(_model(strategy).predict(X, batch_size=BATCH, verbose=0), X @ START)


@_capability
def _loop(strategy: Any, folder: str) -> None:
    import keras

    import kdist

    model = _model(strategy)

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return kdist.nn.compute_average_loss(keras.ops.mean((model(x) - y) ** 2, axis=-1))

        value, gradients = kdist.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)
        return value

    losses = [
        strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
        for batch in strategy.experimental_distribute_dataset(list(_batches(4)))
    ]
    _same(float(losses[0]), np.mean((X[:4] @ START - Y[:4]) ** 2))
    _same(model.get_weights()[0], _trained(_batches(4)))


@_capability
def _tf_data(strategy: Any, folder: str) -> None:
    import tensorflow as tf

    _check_fit(strategy, tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH))


@_capability
def _data_loader(strategy: Any, folder: str) -> None:
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    _check_fit(strategy, torch.utils.data.DataLoader(rows, batch_size=BATCH))


@_capability
def _py_dataset(strategy: Any, folder: str) -> None:
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-ROWS // BATCH)

        def __getitem__(self, index: int) -> Any:
            return list(_batches())[index]

    _check_fit(strategy, Batches(), shuffle=False)


@_capability
def _generator(strategy: Any, folder: str) -> None:
    _check_fit(strategy, _batches())


@_capability
def _distribute_dataset(strategy: Any, folder: str) -> None:
    _check_fit(strategy, strategy.experimental_distribute_dataset(list(_batches())))


@_capability
def _from_function(strategy: Any, folder: str) -> None:
    def dataset_fn(context: Any) -> Any:
        mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        x, y = X[mine], Y[mine]
        return [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]

    runtime = strategy.runtime
    local, workers = len(runtime.devices), runtime.num_workers
    number = local * workers
    # Each step takes the next rows of each worker's share for its replicas.
    steps = [
        [(step * local + i) * workers + worker for worker in range(workers) for i in range(local)]
        for step in range(ROWS // number)
    ]
    _check_fit(
        strategy,
        strategy.distribute_datasets_from_function(dataset_fn),
        _trained((X[rows], Y[rows]) for rows in steps),
    )


@_capability
def _numpy_dataset(strategy: Any, folder: str) -> None:
    dataset = strategy.make_experimental_numpy_dataset((X, Y)).batch(BATCH)
    _check_fit(strategy, strategy.experimental_distribute_dataset(dataset))


@_capability
def _save(strategy: Any, folder: str) -> None:
    import keras

    model = _check_fit(strategy, X, y=Y, batch_size=BATCH, shuffle=False)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "model.keras")
    model.save(path)
    _same(keras.models.load_model(path).get_weights()[0], model.get_weights()[0])


@_capability
def _checkpoint(strategy: Any, folder: str) -> None:
    import kdist

    model = _check_fit(strategy, X, y=Y, batch_size=BATCH, shuffle=False)
    trained = model.get_weights()
    checkpoint = kdist.Checkpoint(model=model)
    path = checkpoint.save(os.path.join(folder, "ckpt"))
    model.set_weights([START])
    checkpoint.restore(path).assert_consumed()
    _same(model.get_weights()[0], trained[0])


@_capability
def _distribution(strategy: Any, folder: str) -> None:
    assert strategy.keras_distribution.device_mesh.devices.size == strategy.num_replicas_in_sync


# The page -------------------------------------------------------------------------------------------------------------


def page(results: dict[str, dict[str, str]]) -> str:
    """Returns the page, in Markdown.

    Args:
        results: The results of `run_all` by "strategy-backend".
    """
    lines = [
        "# Support matrix",
        "",
        "Check here whether a strategy works on your backend. ✓ means that the test suite trained a small model with",
        "this strategy, on CPUs of one machine, and the results matched values computed by hand. A number links to the",
        "reason why a feature is missing. [Guarantees](contract.md) lists more features of `fit`.",
    ]
    notes: list[str] = []
    for capabilities, rows in _alike(results, notes).items():
        titles = [unsupported.CAPABILITIES[capability] for capability in capabilities]
        words = f"{', '.join(titles[:-1])} and {titles[-1]}" if titles[1:] else titles[0]
        lines += ["", *textwrap.wrap(f"{words[0].upper()}{words[1:]}:", 110), ""]
        lines += [f"| strategy | {' | '.join(BACKENDS.values())} |", "| --- |" + " :-: |" * len(BACKENDS)]
        lines += [f"| `{name}` | {' | '.join(marks)} |" for name, marks in zip(STRATEGIES, rows, strict=True)]
    lines += [
        "",
        "- `TPUStrategy` ran on CPU devices. It has not run on a TPU.",
        "- `ParameterServerStrategy` works on all three backends: see its",
        "  [test results](contract.md#what-is-tested) and [limits](parameter-servers.md#limits).",
        "- On PyTorch, `FullyShardedStrategy` and `ModelParallelStrategy` need one worker per device.",
        "- On TensorFlow, `MultiWorkerMirroredStrategy` needs one worker per CPU device. A worker can",
        "  use several GPUs.",
        "",
        "## Reasons",
        "",
    ]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines) + "\n"


def _alike(results: Any, notes: list[str]) -> dict[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Groups the capabilities that have the same marks, and returns these marks by strategy and backend."""
    found: dict[tuple[tuple[str, ...], ...], tuple[str, ...]] = {}
    for capability in _functions:
        rows = tuple(
            tuple(_mark(name, backend, capability, results, notes) for backend in BACKENDS)
            for name in STRATEGIES
        )
        found[rows] = (*found.get(rows, ()), capability)
    return {capabilities: rows for rows, capabilities in found.items()}


def _mark(name: str, backend: str, capability: str, results: Any, notes: list[str]) -> str:
    outcome = results[f"{name}-{backend}"][capability]
    gap = unsupported.find(name.rpartition(".")[2], backend, capability)
    if outcome != "gap" or gap is None:
        return "✓" if outcome == "passed" else "✗"
    note = f"{gap.reason} {gap.remedy}"
    if note not in notes:
        notes.append(note)
    return f"[{notes.index(note) + 1}](#reasons)"


def main(arguments: list[str]) -> None:
    """Reads the results and writes the page."""
    results, document = map(Path, arguments)
    document.write_text(page(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
