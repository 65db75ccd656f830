"""Runs the examples of the pages on input and on custom loops."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import assert_same, dataset, new_model, rows, trained_on_one_device
from tests.helpers.processes import strategy


@runs(
    replaced=("seed=1)", "seed=1, reshuffle_each_iteration=False)")
)  # or each pass over the dataset would have another order
def input_0(example: Run) -> None:
    import tensorflow as tf

    model = new_model()
    example(tf=tf, model=model, **rows())
    assert_same(trained_on_one_device(dataset()), model)


def input_1(example: Run) -> None:
    import kdist

    model = new_model()
    example(kdist=kdist, strategy=strategy(), model=model, dataset=dataset())
    assert_same(trained_on_one_device(dataset()), model)


def input_2(example: Run) -> None:
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
    # A batch contains 64 rows of each file.
    order = [np.concatenate([data[0::2][i : i + 64], data[1::2][i : i + 64]]) for i in range(0, 150, 64)]
    plain = new_model(plain=True)
    for batch in order * 5:
        plain.train_on_batch(batch[:, :8], batch[:, 8:])
    assert_same(plain, model)


def input_3(example: Run) -> None:
    import keras

    left = example(strategy=strategy(), dataset=dataset(shuffles=False))
    first = 256 + 22 * int(os.environ["RANK"])  # the last batch has 44 rows, 22 per worker
    for name, whole in rows().items():
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(left[name]), whole[first : first + 22])


def loops_1(example: Run) -> None:
    import keras

    import kdist

    s = strategy()

    batches = [np.arange(i, i + 3, dtype="float32") for i in (0, 3)]
    given = {"keras": keras, "kdist": kdist, "strategy": s, "dataset": batches}
    left = example(replica_step=keras.ops.sum, **given)
    assert float(left["train_epoch"](s.experimental_distribute_dataset(batches))) == sum(range(6))


def loops_2(example: Run) -> None:
    import keras

    # Each of the two replicas adds its rows: 1 + 2, and 4 + 8.
    dataset = [(np.float32([[1], [2], [4], [8]]), np.zeros(4))]
    seen = example(keras=keras, strategy=strategy(), dataset=dataset)
    assert float(seen["parts"]) == (3, 12)[int(os.environ["RANK"])] and float(seen["seen"]) == 15


def loops_3(example: Run) -> None:
    import keras

    import kdist

    ops = example(keras=keras, kdist=kdist)["MyOps"]()
    halves = kdist.DistributedValues([keras.ops.ones(()), keras.ops.convert_to_tensor(2.0)])
    assert (float(ops.reduce("SUM", halves, None)), float(ops.reduce("MEAN", halves, None))) == (3, 1.5)


def loops_4(example: Run) -> None:
    import kdist

    rank = int(os.environ["RANK"])
    exchanged = example(kdist=kdist, rng=np.random.default_rng(rank), loss=3.0 + rank)
    assert exchanged["config"] == {"seed": np.random.default_rng(0).integers(1000)}
    assert exchanged["losses"] == [{"loss": 3.0}, {"loss": 4.0}]


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
