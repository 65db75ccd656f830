"""Each replica gets the expected rows for all kinds of datasets, policies, batch sizes and replica counts."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from tests.helpers.data import py_dataset
from tests.helpers.processes import TIMEOUT, each_backend, run, start_pool, strategy

SIZES = ((12, 4, False), (10, 4, False), (10, 4, True), (7, 5, False), (5, 8, False), (9, 1, False))
KINDS = ("tf.data", "DataLoader", "PyDataset", "Grain", "generator function", "list", "numpy")


def batches_of(rows, size, drop_remainder):
    """Returns the global batches, by hand."""
    cut = [list(range(i, min(i + size, rows))) for i in range(0, rows, size)]
    return [b for b in cut if len(b) == size or not drop_remainder]


def split_by_hand(batch, replicas):
    """Splits a batch as evenly as possible, with the larger parts first."""
    sizes = [len(batch) // replicas + (i < len(batch) % replicas) for i in range(replicas)]
    return [batch[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(replicas)]


def make_dataset(kind, rows, size, drop_remainder):
    """Returns a dataset of global batches of the numbers from 0."""
    values = np.arange(rows, dtype="int32")
    batches = [values[b[0] : b[-1] + 1] for b in batches_of(rows, size, drop_remainder)]
    if kind == "tf.data":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(values).batch(size, drop_remainder=drop_remainder)
    if kind == "DataLoader":
        import torch

        return torch.utils.data.DataLoader(values.tolist(), batch_size=size, drop_last=drop_remainder)
    if kind == "PyDataset":
        return py_dataset(batches, 2)
    if kind == "Grain":
        import grain

        return grain.MapDataset.source(values).batch(size, drop_remainder=drop_remainder)
    if kind == "numpy":
        return strategies[0].make_experimental_numpy_dataset(values).batch(size, drop_remainder)
    return batches if kind == "list" else lambda: iter(batches)


def read(strategy, dataset):
    """Returns the rows of each local replica, step by step."""
    import keras

    return [
        [keras.ops.convert_to_numpy(part).tolist() for part in strategy.experimental_local_results(element)]
        for element in dataset
    ]


# One process with one to four devices -------------------------------------------------------------------------

strategies = []


def in_worker_make_strategies():
    import kdist

    devices = [f"cpu:{i}" for i in range(4)]
    strategies.extend([kdist.MirroredStrategy(devices[:n]) for n in (4, 3, 2, 1)])


@pytest.fixture(scope="module")
def four_devices(backend):
    with start_pool(1, backend) as pool:
        pool.run(in_worker_make_strategies, timeout=TIMEOUT)
        yield pool


def in_worker_read_all():
    found = {}
    for one, kind, (rows, size, drop) in itertools.product(strategies, KINDS, SIZES):
        dataset = one.experimental_distribute_dataset(make_dataset(kind, rows, size, drop))
        twice = [read(one, dataset), read(one, dataset)]
        assert twice[0] == twice[1], "each epoch has the same rows"
        found[one.num_replicas_in_sync, kind, rows, size, drop] = twice[0], dataset.num_steps
    return found


@pytest.mark.kills(data_rows_swapped="[torch]")
@each_backend
def test_global_batches_over_one_to_four_replicas(backend, four_devices):
    found = four_devices.run(in_worker_read_all, timeout=TIMEOUT)[0]
    assert len(found) == 4 * len(KINDS) * len(SIZES)
    for (replicas, kind, rows, size, drop), (steps, number) in found.items():
        expected = [split_by_hand(batch, replicas) for batch in batches_of(rows, size, drop)]
        assert steps == expected, (replicas, kind, rows, size, drop)
        assert number == (None if kind == "generator function" else len(expected))


def in_worker_read_own():
    """Each replica takes one of the pipeline's batches in turn; the last step has the rest."""
    found = {}
    for one, kind, (rows, size, drop) in itertools.product(strategies, KINDS, SIZES):
        dataset = one.distribute_datasets_from_function(
            lambda context, k=kind, r=rows, s=size, d=drop: make_dataset(k, r, s, d)
        )
        found[one.num_replicas_in_sync, kind, rows, size, drop] = read(one, dataset), dataset.num_steps
    return found


@each_backend
def test_per_replica_batches_over_one_to_four_replicas(backend, four_devices):
    for (replicas, kind, rows, size, drop), (steps, number) in four_devices.run(
        in_worker_read_own, timeout=TIMEOUT
    )[0].items():
        batches = batches_of(rows, size, drop)
        batches += [[]] * (-len(batches) % replicas)
        expected = [batches[i : i + replicas] for i in range(0, len(batches), replicas)]
        assert steps == expected, (replicas, kind, rows, size, drop)
        assert number == (None if kind == "generator function" else len(expected))


def in_worker_per_replica_pipelines():
    import kdist

    options = kdist.InputOptions(experimental_replication_mode=kdist.InputReplicationMode.PER_REPLICA)
    contexts = []

    def dataset_fn(context):
        contexts.append(
            (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        )
        return [np.array([context.input_pipeline_id * 10 + i]) for i in range(context.input_pipeline_id + 1)]

    dataset = strategies[1].distribute_datasets_from_function(dataset_fn, options)
    return contexts, read(strategies[1], dataset)


@each_backend
def test_one_pipeline_a_replica(backend, four_devices):
    contexts, steps = four_devices.run(in_worker_per_replica_pipelines, timeout=TIMEOUT)[0]
    assert contexts == [(3, 0, 3), (3, 1, 3), (3, 2, 3)]
    assert steps == [[[0], [10], [20]], [[], [11], [21]], [[], [], [22]]]


# Two workers --------------------------------------------------------------------------------------------------


def in_worker_read_shared():
    strategies[:] = [strategy()]
    return {
        (kind, rows, size, drop): read(
            strategy(), strategy().experimental_distribute_dataset(make_dataset(kind, rows, size, drop))
        )
        for kind, (rows, size, drop) in itertools.product(KINDS, SIZES)
    }


@each_backend
def test_global_batches_over_two_workers(backend):
    workers = run(backend, 2, in_worker_read_shared)
    for kind, rows, size, drop in workers[0]:
        expected = [split_by_hand(batch, 2) for batch in batches_of(rows, size, drop)]
        for index, found in enumerate(workers):
            assert found[kind, rows, size, drop] == [[step[index]] for step in expected], (kind, rows, size)


def in_worker_read_by_policy(folder):
    import copy

    import tensorflow as tf
    import torch

    import kdist

    files = sorted(os.path.join(folder, name) for name in os.listdir(folder))
    policies = tf.data.experimental.AutoShardPolicy
    hint = tf.data.experimental.SHARD_HINT

    def lines(files):
        text = tf.data.TextLineDataset(files)
        return text.map(lambda line: tf.strings.to_number(line, tf.int32))

    def with_policy(dataset, policy):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)

    class Files(torch.utils.data.IterableDataset):
        def __init__(self):
            self.files = files

        def __iter__(self):
            for name in self.files:
                yield from np.loadtxt(name, dtype="int32", ndmin=1)

    class Batches:
        def __init__(self):
            self.files = files

        def __iter__(self):
            return (np.loadtxt(name, dtype="int32", ndmin=1) for name in self.files)

    numbers = tf.data.Dataset.range(10, output_type=tf.int32)
    file = kdist.InputOptions(auto_shard_policy=kdist.AutoShardPolicy.FILE)
    off = kdist.InputOptions(auto_shard_policy=policies.OFF)
    distribute = strategy().experimental_distribute_dataset
    datasets = {
        "auto, files": distribute(lines(files).batch(4)),
        "auto, interleaved files": distribute(
            tf.data.Dataset.from_tensor_slices(files).interleave(lines, cycle_length=1).batch(4)
        ),
        "auto, no files": distribute(numbers.batch(4)),
        "data, files": distribute(with_policy(lines(files).batch(4), policies.DATA)),
        "off": distribute(with_policy(numbers.batch(4), policies.OFF)),
        "off, threes": distribute(with_policy(numbers.batch(3), policies.OFF)),
        "hint": distribute(with_policy(numbers.shard(hint, hint).batch(4), policies.HINT)),
        "loader of files": distribute(torch.utils.data.DataLoader(Files(), batch_size=4), file),
        "iterable of files": distribute(Batches(), file),
        "iterable, off": distribute([np.arange(4), np.arange(4, 7)], off),
    }
    return {name: read(strategy(), copy.copy(dataset)) for name, dataset in datasets.items()}


POLICIES = {
    # Four files with the numbers 0-3, 4-7, 8-11, 12-14. A worker reads every other file. In each step, it
    # takes two rows, the share of its replica in a global batch of four.
    "auto, files": ([[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [6, 7], [12, 13], [14]]),
    "auto, interleaved files": ([[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [6, 7], [12, 13], [14]]),
    "auto, no files": ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]),
    "data, files": ([[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14]]),
    "off": ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
    # In each step, the workers take three rows: two and one, in turn.
    "off, threes": (
        [[0, 1], [2], [3, 4], [5], [6, 7], [8], [9]],
        [[0], [1, 2], [3], [4, 5], [6], [7, 8], [9]],
    ),
    "hint": ([[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]),
    "loader of files": ([[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [6, 7], [12, 13], [14]]),
    "iterable of files": ([[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [6, 7], [12, 13], [14]]),
    "iterable, off": ([[0, 1], [2, 3], [4, 5], [6]], [[0, 1], [2, 3], [4, 5], [6]]),
}


@pytest.mark.kills("pieces_without_turns", data_files_of_the_chief="[torch]")
@each_backend
def test_policies_over_two_workers(backend, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("\n".join(str(n) for n in range(4 * i, min(4 * i + 4, 15))))
    for index, found in enumerate(run(backend, 2, in_worker_read_by_policy, str(tmp_path))):
        assert found.keys() == POLICIES.keys()
        for name, steps in found.items():
            assert steps == [[rows] for rows in POLICIES[name][index]], name


def in_worker_shuffled_loader():
    import torch

    def loader(**arguments):
        return torch.utils.data.DataLoader(list(range(10)), batch_size=4, shuffle=True, **arguments)

    torch.manual_seed(strategy().runtime.worker_index)  # as in scripts that forget to seed
    seeded = loader(generator=torch.Generator().manual_seed(3))
    alone = loader(generator=torch.Generator().manual_seed(3))
    expected = [[batch.tolist() for batch in alone] for _ in range(2)]
    dataset = strategy().experimental_distribute_dataset(seeded)
    found = [read(strategy(), dataset) for _ in range(2)]
    unseeded = strategy().experimental_distribute_dataset(loader())
    return expected, found, [read(strategy(), unseeded) for _ in range(2)]


@pytest.mark.kills(data_seed_not_shared="[torch]")
@each_backend
def test_a_loader_that_shuffles_gives_all_workers_one_order(backend):
    workers = run(backend, 2, in_worker_shuffled_loader)
    for epoch in range(2):
        together = [a[0] + b[0] for a, b in zip(*(found[epoch] for _, found, _ in workers), strict=True)]
        assert together == workers[0][0][epoch], "as the loader alone"
    epochs = [
        [
            row
            for step in zip(*(w[2][epoch] for w in workers), strict=True)
            for part in step
            for row in part[0]
        ]
        for epoch in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
