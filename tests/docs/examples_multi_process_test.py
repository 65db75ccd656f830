"""The examples of all pages run as they stand there, each on one of the backends, and do what the page says."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.environment import ROOT
from tests.processes import BACKENDS, Script, run, strategy

# Where another test runs an example, in place of this one.
ELSEWHERE = {
    "loops 0": "loops_test.py",
    "launcher 0": "below: it starts workers of its own",
    "launcher 1": "launch/ray_multi_process_test.py",
    **{f"parameter-servers {n}": "parameter_servers_multi_process_test.py" for n in (0, 1)},
    "cluster 1": "tpu_strategy_multi_process_test.py, without TPUs",
}
# What a machine without GPUs cannot do, what takes too long, and an order that depends on how often somebody looks.
REPLACED = {
    "quickstart 1": ("gpu:", "cpu:"),
    "resuming 2": ("10_000", "20"),
    "input 0": ("seed=1)", "seed=1, reshuffle_each_iteration=False)"),
    "sharding 1": ('"batch": 2, "model": 4', '"batch": 1, "model": 2'),
    "sharding 2": ("(2, 4)", "(1, 2)"),
}


def examples():
    """The examples by page and number."""
    return {
        f"{page.stem} {number}": block
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        )
    }


# In the workers. Each function is given the example, to be called with the names that the page has before it. ----


def images():
    draw = np.random.RandomState(0)
    return {"x": draw.rand(60, 28, 28).astype("float32"), "y": draw.randint(10, size=60)}


def rows():
    draw = np.random.RandomState(0)
    x = draw.randn(300, 8).astype("float32")
    return {"x": x, "y": x[:, :1] - x[:, 1:2]}


def new_model(plain=False):
    import contextlib

    import keras

    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if plain else strategy().scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


def dataset(shuffles=True):
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices(tuple(rows().values()))
    if shuffles:
        whole = whole.shuffle(10_000, seed=1, reshuffle_each_iteration=False)
    return whole.batch(128)


def losses_of(model):
    return model.history.history["loss"]


def assert_same(one, two):
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def trained_on_one_device(data):
    model = new_model(plain=True)
    model.fit(data, epochs=5, verbose=0)
    return model


def checkpoints_0(example):
    first = example(**images())
    assert first["checkpoint"].epoch == 10 and len(first["manager"].checkpoints) == 3
    again = example(**images())  # the job, started once more: all epochs are done
    assert_same(first["model"], again["model"])


def checkpoints_1(example):
    import kdist

    model = new_model()
    checkpoint = kdist.Checkpoint(model=model)
    checkpoint.save("checkpoints", asynchronous=False)
    saved = [w + 0 for w in model.get_weights()]
    model.set_weights([w + 1 for w in saved])
    example(checkpoint=checkpoint, kdist=kdist)
    for expected, found in zip(saved, model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


def cluster_0(example):
    import types

    import kdist

    # The strategy would wait for host0 and host1.
    made = types.SimpleNamespace(
        cluster_resolver=kdist.cluster_resolver, MultiWorkerMirroredStrategy=lambda resolver: resolver
    )
    resolver = example(kdist=made)["strategy"]
    assert resolver.cluster_spec().as_dict() == {"worker": ["host0:2222", "host1:2222"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


def evaluator_0(example):
    import kdist

    model, (x, y) = new_model(), rows().values()
    kdist.Checkpoint(model=model).save("checkpoints", asynchronous=False)
    kdist.SidecarEvaluator.announce_end("checkpoints")
    names = example(kdist=kdist, model=new_model(plain=True), x_test=x, y_test=y)
    assert len(names["evaluations"]) == 1 and os.path.exists("best.keras")


def evaluator_1(example):
    import keras

    import kdist

    class Batches(keras.utils.PyDataset):
        def __init__(self, x, y, size):
            super().__init__()
            self.parts = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)] * 60

        def __len__(self):
            return len(self.parts)

        def __getitem__(self, index):
            return self.parts[index]

    names = example(kdist=kdist, Batches=Batches, make_model=lambda: new_model(plain=True), **rows())
    assert (names["logs"] or {"global_step": 50})["global_step"] == 50  # of several workers none says
    assert kdist.latest_checkpoint("checkpoints").endswith("50")


def failures_0(example):
    from kdist import faults

    assert example()["faults"] is faults  # nothing is injected: the point does nothing


def index_0(example):
    losses = losses_of(example(**rows())["model"])
    assert len(losses) == 5 and losses[-1] < losses[0]


def input_0(example):
    import tensorflow as tf

    model = new_model()
    example(tf=tf, model=model, **rows())
    assert_same(trained_on_one_device(dataset()), model)


def input_1(example):
    import kdist

    model = new_model()
    example(kdist=kdist, strategy=strategy(), model=model, dataset=dataset())
    assert_same(trained_on_one_device(dataset()), model)


def input_2(example):
    import tensorflow as tf

    data = np.concatenate(list(rows().values()), axis=1)
    files = [f"rows-{os.environ['RANK']}-{part}" for part in range(2)]
    for part, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            for row in data[part::2]:
                writer.write(row.tobytes())

    def parse(record):
        row = tf.reshape(tf.io.decode_raw(record, "float32"), (9,))
        return row[:8], row[8:]

    model = new_model()
    example(tf=tf, files=files, parse=parse, strategy=strategy(), model=model)
    # A batch is 64 rows of either file.
    order = [np.concatenate([data[0::2][i : i + 64], data[1::2][i : i + 64]]) for i in range(0, 150, 64)]
    plain = new_model(plain=True)
    for batch in order * 5:
        plain.train_on_batch(batch[:, :8], batch[:, 8:])
    assert_same(plain, model)


def input_3(example):
    import keras

    left = example(strategy=strategy(), dataset=dataset(shuffles=False))
    first = 256 + 22 * int(os.environ["RANK"])  # the last batch has 44 rows, 22 for each worker
    for name, whole in rows().items():
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(left[name]), whole[first : first + 22])


def loops_1(example):
    import keras

    import kdist

    s = strategy()

    def train_step(batch):
        return s.reduce("SUM", s.run(keras.ops.sum, args=(batch,)), axis=None)

    batches = [np.arange(i, i + 3, dtype="float32") for i in (0, 3)]
    given = {"keras": keras, "kdist": kdist, "strategy": s, "dataset": batches}
    left = example(train_step=train_step, **given)
    assert float(left["train_epoch"](s.experimental_distribute_dataset(batches))) == sum(range(6))


def loops_2(example):
    import keras

    # Each of the two replicas counts 1 + 2 + 4.
    seen = example(keras=keras, strategy=strategy(), batch=keras.ops.convert_to_tensor([1.0, 2.0, 4.0]))
    assert float(seen["parts"]) == 7 and float(seen["seen"]) == 14


def loops_3(example):
    import keras

    import kdist

    ops = example(keras=keras, kdist=kdist)["MyOps"]()
    halves = kdist.DistributedValues([keras.ops.ones(()), keras.ops.convert_to_tensor(2.0)])
    assert (float(ops.reduce("SUM", halves, None)), float(ops.reduce("MEAN", halves, None))) == (3, 1.5)


def loops_4(example):
    import kdist

    rank = int(os.environ["RANK"])
    exchanged = example(kdist=kdist, rate=0.5 + rank, loss=3.0 + rank)
    assert exchanged["config"] == {"rate": 0.5}
    assert exchanged["losses"] == [{"loss": 3.0}, {"loss": 4.0}]


def quickstart_0(example):
    import keras

    model = new_model()
    example(model=model, **rows())
    assert len(losses_of(model)) == 5
    assert_same(model, keras.models.load_model("model.keras"))


def quickstart_1(example):
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


def resuming_0(example):
    losses = losses_of(example(**images())["model"])
    assert len(losses) == 10 and losses[-1] < losses[0]


def resuming_1(example):
    import kdist

    config = example(kdist=kdist, maintenance_is_near=lambda: False)["config"]
    assert config.grace_period == 300 and config.termination_watcher_fn() is False


def resuming_2(example):
    import kdist

    taken = []
    model = new_model()
    given = {"optimizer": model.optimizer, "train_step": taken.append, "iterator": itertools.count()}
    left = example(kdist=kdist, model=model, **given)
    left["handler"].close()
    assert taken == list(range(20)) and left["checkpoint"].step == left["handler"].total_run_calls == 20


def saving_0(example):
    import keras

    given = {"dataset": dataset(), "validation": dataset(shuffles=False), "strategy": strategy()}
    model = example(keras=keras, make_model=new_model, **given)["model"]
    assert_same(model, keras.models.load_model("model.keras"))
    assert Path("best.keras").is_file() and any(Path("board").rglob("events*"))
    assert len(Path("log.csv").read_text(encoding="utf-8").splitlines()) == 1 + 10


def saving_1(example):
    import keras

    model = new_model()
    model.save("model.keras")
    model.save_weights("best.weights.h5")
    left = example(keras=keras, strategy=strategy(), model=model)
    for loaded in (left["model"], left["plain"]):
        assert_same(new_model(), loaded)


def sharding_0(example):
    def make_a_large_model():
        import keras

        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(1)])

    import kdist

    model = example(kdist=kdist, make_a_large_model=make_a_large_model, **rows())["model"]
    assert not model.layers[0].kernel.value.is_fully_replicated


def sharding_1(example):
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


def sharding_2(example):
    import keras

    import kdist

    strategy = example(keras=keras, kdist=kdist)["strategy"]
    assert tuple(strategy.keras_distribution.device_mesh.shape) == (1, 2)


NAMES = [name for name in examples() if name not in ELSEWHERE]
CASES = sorted(
    ("jax" if name.startswith("sharding") else BACKENDS[i % len(BACKENDS)], name)
    for i, name in enumerate(NAMES)
)


def in_worker_example(name, source, folder):
    path = Path(folder) / f"example-{os.environ['RANK']}.py"
    path.write_text(source, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        globals()[name.replace(" ", "_").replace("-", "_")](lambda **given: runpy.run_path(str(path), given))
    finally:
        os.chdir(before)
    return "done"


@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"pool-{case[0]}")) for case in CASES],
)
def test_example(backend, name, tmp_path):
    source = examples()[name]
    if name in REPLACED:
        assert REPLACED[name][0] in source
        source = source.replace(*REPLACED[name])
    # `MirroredStrategy` is for one process; all else is shown with workers.
    num_workers = 1 if "MirroredStrategy([" in source else 2
    assert run(backend, num_workers, in_worker_example, name, source, str(tmp_path)) == ["done"] * num_workers


def test_the_launchers_example(tmp_path):
    data = """
        import numpy as np
        draw = np.random.RandomState(0)
        x, y = draw.rand(40, 3), draw.rand(40, 1)
    """
    told = "\nimport json\nprint('LOSSES', json.dumps(losses))\n"
    source = textwrap.dedent(data) + examples()["launcher 0"] + told
    script = Script(tmp_path, "launching", source, {})
    try:
        assert script.wait() == 0, script.stderr()
    finally:
        script.kill()
    (said,) = re.findall(r"LOSSES (.*)", script.stdout())
    one, two = json.loads(said)
    assert one == two and len(one) == 5 and one[-1] < one[0]
