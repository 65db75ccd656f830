"""The examples in kdist's docstrings run unchanged: `>>>` lines and blocks of Python.

Each example runs on one backend, and the backends rotate. `tests/docstring_examples_test.py` runs the `>>>`
lines of the packages that do not need a framework.
"""

from __future__ import annotations

import ast
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS, run, strategy

ELSEWHERE = ("cluster", "launch", "testing")  # their `>>>` lines do not need a worker
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Blocks that cannot run here, with the reason. Lines with `>>>` always run.
NOT_RUN = {
    "kdist.cluster.cloud.GCEClusterResolver": "asks Google",
    "kdist.cluster.cloud.KubernetesClusterResolver": "asks Kubernetes",
    "kdist.backends.coordination.experimental_get_current_worker_index": "needs a cluster, as the next ones",
    "kdist.coordinator.cluster_coordinator.ClusterCoordinator": "see tests/docs/examples_multi_process_test.py",
    "kdist.coordinator.server.Server": "see there",
    "kdist.coordinator.strategy.ParameterServerStrategy": "see there",
    "kdist.strategies.tpu.TPUStrategy": "needs TPUs; see tests/tpu_strategy_multi_process_test.py",
    "kdist.testing.pool.WorkerPool": "starts workers of its own, as tests/testing/pool_multi_process_test.py does",
    "kdist.testing.parity.assert_parity": "the same, as the page of testing does, whose examples run",
    "kdist.launch.function.launch": "starts workers of its own, as tests/launch/launch_multi_process_test.py does",
}

ESTIMATOR = """
def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
test_input_fn = lambda: [(x[i : i + 10], y[i : i + 10]) for i in range(0, 300, 10)]
"""

# Code that an example needs in addition to `SETUP`.
GIVEN = {
    "kdist.checkpoint.manager.CheckpointManager": "batches = range(250)\ntrain_step = lambda batch: None",
    "kdist.coordinator.evaluator.SidecarEvaluator": """
x_test, y_test = x, y
kdist.Checkpoint(model=model).save("checkpoints", asynchronous=False)
kdist.SidecarEvaluator.announce_end("checkpoints")
""",
    "kdist.estimator.Estimator": ESTIMATOR + "input_fn = test_input_fn",
    "kdist.estimator.train_and_evaluate": ESTIMATOR + "import tensorflow as tf",
    "kdist.functions.function": "replica_step = lambda batch: keras.ops.sum(batch)",
    "kdist.functions.value_and_grad": """
model, optimizer = plain, keras.optimizers.SGD(0.1)
x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
""",
    "kdist.nn.scale_regularization_loss": "loss, model = 0.0, plain",
    "kdist.strategies.fully_sharded.FullyShardedStrategy": """
make_a_large_model = lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
""",
    "kdist.strategies.strategy.Strategy.distribute_datasets_from_function": """
import tensorflow as tf
with strategy.scope():  # without targets, the regulariser is the loss
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile("sgd")
""",
    "kdist.strategies.strategy.Strategy.experimental_distribute_dataset": "import tensorflow as tf",
    "kdist.strategies.strategy.Strategy.reduce": "step = lambda batch: keras.ops.sum(batch, axis=1)",
    "kdist.training.preemption.PreemptionCheckpointHandler": """
class Counting:
    number = 0
    def __iter__(self):
        return iter(range(self.number, 10_000))
    def get_state(self):
        return self.number
    def set_state(self, state):
        self.number = state
seen, dataset, optimizer = [], Counting(), model.optimizer
train_step = lambda iterator: seen.append(next(iterator))
""",
}

# An expression that must be true after each example.
HOLDS = {
    "kdist.checkpoint.checkpoint.Checkpoint": "checkpoint.epoch == 10 and kdist.latest_checkpoint('checkpoints')",
    "kdist.checkpoint.manager.CheckpointManager": "checkpoint.step == 250 and len(manager.checkpoints) == 3",
    "kdist.context.ReplicaContext.all_reduce": "[float(number) for number in local(value)] == [2.0, 2.0]",
    "kdist.functions.function": "near(train_step(batch), x[:128].sum())",
    "kdist.functions.value_and_grad": "len(gradients) == 2 and near(loss_fn(x, y), loss, below=True)",
    "kdist.nn.compute_average_loss": """near(
        strategy.reduce("SUM", strategy.run(replica_step, args=pair), axis=None),
        np.mean((y[:128] - model.predict(x[:128])) ** 2),
    )""",
    "kdist.coordinator.evaluator.SidecarEvaluator": "len(value) == 1 and os.path.exists('best.keras')",
    "kdist.coordinator.export.SidecarEvaluatorModelExport": "value.monitor == 'accuracy' and value.save_best_only",
    "kdist.estimator.Estimator": "value['global_step'] == 10",
    "kdist.estimator.train_and_evaluate": "kdist.latest_checkpoint('checkpoints').endswith('ckpt-1000')",
    "kdist.data.distributed_dataset.DistributedDataset.reduce": "number_of_steps == 3",
    "kdist.nn.scale_regularization_loss": "near(loss, 0.01 * np.square(array(model.weights[0])).sum())",
    "kdist.communication.cross_device_ops.CrossDeviceOps": """
        near(strategy.reduce("MEAN", kdist.DistributedValues([x, 3 * x]), axis=None), 2 * x) and strategy.own_ops
    """,
    "kdist.strategies.central_storage.CentralStorageStrategy": "steps(model) == 3 and near_plain(model)",
    "kdist.strategies.fully_sharded.FullyShardedStrategy": "steps(model) == 3 and near_plain(model)",
    "kdist.strategies.keras_distribution.KerasDistributionStrategy": "strategy.num_replicas_in_sync == 2",
    "kdist.strategies.mirrored.MirroredStrategy": """
        strategy.num_replicas_in_sync == 2 and steps(model) == 3 and near_plain(model)
    """,
    "kdist.strategies.multi_worker_mirrored.MultiWorkerMirroredStrategy": """
        strategy.num_replicas_in_sync == 2 and steps(model) == 3 and near_plain(model)
    """,
    "kdist.strategies.one_device.OneDeviceStrategy": "strategy.num_replicas_in_sync == 1",
    "kdist.strategies.model_parallel.ModelParallelStrategy": "strategy.num_replicas_in_sync == 2",
    "kdist.strategies.strategy.Strategy": "steps(model) == 3 and near_plain(model)",
    "kdist.strategies.strategy.Strategy.distribute_datasets_from_function": "steps(model) == 3",
    "kdist.strategies.strategy.Strategy.experimental_distribute_dataset": """
        [len(part) for part in local(batch[0])] == [22, 22]
    """,
    "kdist.strategies.strategy.Strategy.make_experimental_numpy_dataset": """
        sorted(round(float(v), 3) for rows, _ in dataset for v in array(rows)[:, 0])
        == sorted(round(float(v), 3) for v in x[:, 0])
    """,
    "kdist.strategies.strategy.Strategy.experimental_distribute_values_from_function": "local(ids) == (0, 1)",
    "kdist.strategies.strategy.Strategy.run": "near(total, x[256:].sum())",
    "kdist.strategies.strategy.Strategy.reduce": "near(mean, x[:128].sum(axis=1).mean())",
    "kdist.strategies.strategy.Strategy.gather": "near(predictions, model.predict(x[:128]))",
    "kdist.synchrony.check_in_sync": "value is None",
    "kdist.training.backup_and_restore.BackupAndRestore": "steps(model) == 100",
    "kdist.training.drift.DriftWatch": "steps(model) == 100",
    "kdist.training.preemption.PreemptionCheckpointHandler": "seen == list(range(10_000))",
    "kdist.training.run_log.RunLog": "os.listdir('runs/first') == ['worker-0.jsonl']",
    "kdist.training.throughput.Throughput": "len(model.history.history['rows_per_second']) == 10",
}

SETUP = """
import os
import keras
import numpy as np
import kdist
keras.utils.set_random_seed(1)
x = np.random.RandomState(0).randn(300, 3).astype("float32")  # with batches of 128, the last one has 44 rows
y = np.random.RandomState(1).randn(300, 1).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer="l2")])
dataset = strategy.make_experimental_numpy_dataset(x).batch(128)
batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
pairs = strategy.make_experimental_numpy_dataset((x, y)).batch(128)
pair = next(iter(strategy.experimental_distribute_dataset(pairs)))
"""


@dataclass(frozen=True)
class Example:
    """An example in a docstring; `block` is true for Python without `>>>`."""

    name: str
    source: str
    block: bool


def docstrings(path):
    """Yields the dotted name and the docstring of a module and of its classes and functions."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    todo = [(module, ast.parse(path.read_text(encoding="utf-8")))]
    while todo:
        name, node = todo.pop()
        yield name, ast.get_docstring(node) or ""
        kinds = (ast.ClassDef, ast.FunctionDef)
        todo += [(f"{name}.{child.name}", child) for child in node.body if isinstance(child, kinds)]


def examples_in(path):
    for name, text in docstrings(path):
        for block in BLOCK.findall(text):
            yield Example(name, block, True)
        if ">>> " in text and path.relative_to(ROOT).parts[1] not in ELSEWHERE:
            yield Example(name, text, False)


FILES = sorted((ROOT / "kdist").rglob("*.py"))
EXAMPLES = [
    example
    for path in FILES
    for example in examples_in(path)
    if not (example.block and example.name in NOT_RUN)
]


def cells():
    found = []
    for example in EXAMPLES:
        # Examples with `tf.` need TensorFlow, and importing it in addition to another framework takes seconds.
        backend = "tensorflow" if "tf." in example.source else BACKENDS[zlib.crc32(example.name.encode()) % 3]
        if "distribution" in example.source or "Parallel" in example.source or "Sharded" in example.source:
            backend = "jax"  # JAX shards variables over the devices of one process
        found.append((backend, 2 if "MultiWorker" in example.source else 1, example))
    return sorted(found, key=lambda cell: (BACKENDS.index(cell[0]), cell[1]))


@pytest.mark.kills(
    docstrings_strategies_lose_gradients="[kdist.strategies.central_storage.CentralStorageStrategy-tensorflow]"
)
@pytest.mark.parametrize(
    ("backend", "num_workers", "example"),
    [
        pytest.param(*cell, id=f"{cell[2].name}-{cell[0]}", marks=pytest.mark.xdist_group(f"pool-{cell[0]}"))
        for cell in cells()
    ],
)
@pytest.mark.in_turn(3)
def test_example(backend: str, num_workers: int, example: Example, tmp_path: Path) -> None:
    if not example.block:
        failed, attempted, report = run(backend, num_workers, run_lines, example.name, example.source)[0]
        assert attempted > 0
        assert failed == 0, report
        return
    given = SETUP + GIVEN.get(example.name, "")
    held = run(backend, num_workers, run_block, given, example.source, HOLDS[example.name], str(tmp_path))
    assert held == [True] * num_workers


def run_lines(name, text):
    """Runs `>>>` lines in a worker; returns the number of failed lines and of all lines, and the failures."""
    import doctest

    said = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return results.failed, results.attempted, "".join(said)


def run_block(given, source, holds, folder):
    """Runs a block in a worker, in a separate directory; returns whether the expression `holds` is true."""
    import ast
    import os
    import signal
    import textwrap
    from unittest import mock

    import keras
    import numpy as np

    from tests.docs.things import NoKdist

    def array(value):
        return np.asarray(keras.ops.convert_to_numpy(value))

    names = {
        "strategy": strategy(),
        "array": array,
        "near": lambda a, b, below=False: (
            bool(np.all(array(a) < array(b))) if below else np.allclose(array(a), array(b), 1e-4, 1e-5)
        ),
        "local": lambda value: names["strategy"].experimental_local_results(value),
        "steps": lambda model: int(array(model.optimizer.iterations)),
    }

    def near_plain(model):
        """Returns whether the block trains the same model without a strategy."""
        plain = names | {"strategy": strategy()}
        exec(textwrap.dedent(given), plain)
        plain["kdist"] = NoKdist()
        with mock.patch.dict("sys.modules", kdist=NoKdist()):
            exec(source, plain)
        weights = zip(model.get_weights(), plain["model"].get_weights(), strict=True)
        return all(names["near"](found, expected) for found, expected in weights)

    before = os.getcwd()
    handler = signal.getsignal(signal.SIGTERM)  # the example for preemption sets another handler
    os.chdir(folder)
    try:
        names["near_plain"] = near_plain
        exec(textwrap.dedent(given), names)
        body = ast.parse(source)
        if isinstance(body.body[-1], ast.Expr):  # saves its value, which `holds` can use
            body.body[-1] = ast.Assign([ast.Name("value", ast.Store())], body.body[-1].value)
        exec(compile(ast.fix_missing_locations(body), "<example>", "exec"), names)
        return bool(eval(f"({holds.strip()})", names))
    finally:
        os.chdir(before)
        signal.signal(signal.SIGTERM, handler)


def test_no_example_is_left_out() -> None:
    lines = blocks = 0
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        blocks += len(re.findall(r"^\s*```python$", text, re.MULTILINE))
        if path.relative_to(ROOT).parts[1] not in ELSEWHERE:
            lines += len(re.findall(r"^\s*>>> ", text, re.MULTILINE))
    assert sum(e.block for e in EXAMPLES) == blocks - len(NOT_RUN)
    assert sum(e.source.count(">>> ") for e in EXAMPLES if not e.block) == lines > 50
    assert set(GIVEN) | set(HOLDS) == {e.name for e in EXAMPLES if e.block}
