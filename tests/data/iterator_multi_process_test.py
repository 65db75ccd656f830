"""`DistributedIterator`: its elements, its end, and a position that you can save and restore."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data.fit_multi_process_test import NUM_WORKERS
from tests.helpers.data import in_batches, make_data, py_dataset
from tests.helpers.processes import each_backend, run, strategy


def in_worker_iterate():
    import keras

    import kdist

    x, y = make_data(10)
    dataset = strategy().experimental_distribute_dataset(in_batches(x, y, (4, 4, 2)))
    spec = [(tuple(s.shape), keras.backend.standardize_dtype(s.dtype)) for s in dataset.element_spec]
    iterator = iter(dataset)
    first = keras.ops.convert_to_numpy(iterator.get_next()[0])
    assert iterator.get_next_as_optional().has_value()
    state = dataset.get_state()
    last = keras.ops.convert_to_numpy(iterator.get_next_as_optional().get_value()[0])
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(kdist.errors.OutOfRangeError):
        iterator.get_next()
    end = dataset.get_state()
    rows = dataset.reduce([], lambda seen, batch: [*seen, len(batch[0])])
    return spec, first, last, state, end, rows


@each_backend
def test_the_iterator(backend):
    x, _ = make_data(10)
    for index, (spec, first, last, state, end, rows) in enumerate(
        run(backend, NUM_WORKERS, in_worker_iterate)
    ):
        assert spec == [((None, 3), "float32"), ((None, 1), "float32")]
        np.testing.assert_array_equal(first, x[2 * index : 2 * index + 2])
        np.testing.assert_array_equal(last, x[8 + index : 9 + index])
        assert state == {"epoch": 0, "step": 2, "pipelines": 1}
        assert end == {"epoch": 1, "step": 0, "pipelines": 1}
        assert rows == [2, 2, 1]


def resumable(kind):
    """Returns a dataset that shuffles, made again as after a restart."""

    values = np.arange(12, dtype="int32")
    if kind == "tf.data":
        import tensorflow as tf

        tf.random.set_seed(3)  # as a script does: both seeds determine the order
        return tf.data.Dataset.from_tensor_slices(values).shuffle(12, seed=1).batch(4)
    if kind == "DataLoader":
        import torch

        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.DataLoader(values, batch_size=4, shuffle=True, generator=generator)
    if kind == "Grain":
        import grain

        return grain.MapDataset.source(values).shuffle(seed=1).batch(4)
    if kind == "numpy":
        from kdist.data.numpy_dataset import NumpyDataset

        return NumpyDataset(values).shuffle(12, seed=1).batch(4)

    return py_dataset([values[first : first + 4] for first in (0, 4, 8)], 2)


def read(dataset, number=9):
    """Returns the values of the first elements."""
    import keras

    return [
        keras.ops.convert_to_numpy(element).tolist()
        for _, element in zip(range(number), dataset, strict=False)
    ]


def distributed(kind):
    return strategy().experimental_distribute_dataset(resumable(kind))


KINDS = ["tf.data", "DataLoader", "Grain", "numpy", "PyDataset"]
ONE_ORDER = ("PyDataset", "Grain")


def in_worker_positions(kind):
    """Reads three epochs, saves positions for another process, and mixes several iterators and peeks."""
    whole = distributed(kind)
    epochs = [read(whole) for _ in range(3)]
    states = {}

    dataset = distributed(kind)
    one = iter(dataset)
    read(one, 1)
    assert tuple(dataset.element_spec.shape) == (None,)
    dataset.peek_part()
    states["after a peek"] = dataset.get_state()
    two = iter(dataset)
    found = [read(two, 2), read(one, 1), read(two), read(one)]
    states["of both"] = [one.get_state(), two.get_state(), dataset.get_state()]

    begun = iter(dataset)
    read(begun, 2)
    states["begun"] = begun.get_state()
    dataset.set_state({"epoch": 1, "step": 1})
    states["set"] = dataset.get_state()
    found += [read(dataset), read(dataset), read(begun)]
    return epochs, found, json.dumps(states)


@pytest.mark.kills(data_skips_too_few="[numpy-torch]")
@each_backend
@pytest.mark.parametrize("kind", KINDS)
def test_positions_belong_to_iterators(backend, kind):
    workers = run(backend, NUM_WORKERS, in_worker_positions, kind)
    assert len({states for _, _, states in workers}) == 1, "equal on all workers"
    for epochs, found, states in workers:
        first, second, third = epochs
        assert first != second or kind in ONE_ORDER
        assert found[:4] == [second[:2], first[1:2], second[2:], first[2:]]
        assert found[4:] == [second[1:], third, third[2:]]
        states = json.loads(states)
        assert states["after a peek"] == {"epoch": 0, "step": 1, "pipelines": 1}
        assert states["of both"] == [
            {"epoch": 1, "step": 0, "pipelines": 1},
            {"epoch": 2, "step": 0, "pipelines": 1},
            {"epoch": 2, "step": 0, "pipelines": 1},
        ]
        assert states["begun"] == {"epoch": 2, "step": 2, "pipelines": 1}
        assert states["set"] == {"epoch": 1, "step": 1, "pipelines": 1}
    # The position of global batches is valid for other processes, and for another number of processes.
    (rest, end), *_ = run(backend, 1, in_worker_resume_alone, kind, json.dumps(states["begun"]))
    halves = [epochs[2][2:] for epochs, _, _ in workers]
    assert rest == [first + second for first, second in zip(*halves, strict=True)]
    assert end == {"epoch": 3, "step": 0, "pipelines": 1}


def in_worker_resume_alone(kind, state):
    dataset = distributed(kind)
    dataset.set_state(json.loads(state))
    rows = [np.concatenate(local(element)).tolist() for element in dataset]
    return rows, dataset.get_state()


def local(element):
    import keras

    return [keras.ops.convert_to_numpy(part) for part in strategy().experimental_local_results(element)]


def in_worker_other_pipelines():
    """Returns the numbers of warnings of states, for a dataset with a pipeline per worker and a global one."""
    from unittest import mock

    from kdist.data import distributed_dataset

    batches = [np.zeros((2, 1))] * 3
    own = strategy().distribute_datasets_from_function(lambda _: batches)
    read(own, 2)
    saved = json.loads(json.dumps(own.get_state()))
    warnings = []
    for dataset in (own, strategy().experimental_distribute_dataset(batches)):
        for state in (saved, {**saved, "pipelines": 1}, {"epoch": 0, "step": 2}, {**saved, "step": 0}):
            with mock.patch.object(distributed_dataset, "logger") as logger:
                dataset.set_state(state)
            warnings.append(logger.warning.call_count)
    return saved, warnings


@pytest.mark.kills(data_other_pipelines_unnoticed="[torch]")
@each_backend
def test_a_position_of_another_number_of_pipelines_warns(backend):
    (saved, chief), (_, other) = run(backend, NUM_WORKERS, in_worker_other_pipelines)
    assert saved == {"epoch": 0, "step": 2, "pipelines": 2}
    assert chief == [0, 1, 0, 0, 1, 0, 0, 0]
    assert other == [0] * 8


def in_worker_cannot_go_back():
    import tensorflow as tf

    # The last part of the pipeline cannot save its state.
    pipeline = tf.data.Dataset.range(4).shuffle(4, seed=1).batch(2)
    pipeline = pipeline.apply(tf.data.experimental.copy_to_device("/cpu:0"))
    dataset = strategy().experimental_distribute_dataset(pipeline)
    list(dataset)
    dataset.set_state({"epoch": 0, "step": 0})
    with pytest.raises(ValueError, match="cannot restore an earlier order") as caught:
        list(dataset)
    return str(caught.value)


@each_backend
def test_a_pipeline_that_cannot_go_back_says_so(backend):
    for message in run(backend, NUM_WORKERS, in_worker_cannot_go_back):
        assert "Create the dataset again" in message


# Worker processes of a DataLoader --------------------------------------------------------------------------------


def in_worker_persistent():
    import gc
    import multiprocessing
    import os
    import time

    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            return torch.tensor([index, os.getpid()])

    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
    dataset = strategy().experimental_distribute_dataset(loader)
    epochs = [np.array(read(dataset, 99)) for _ in range(2)]
    left = iter(dataset)
    read(left, 1)
    other = np.array(read(dataset, 99))  # while the persistent processes serve another iterator
    left.close()
    after = np.array(read(dataset, 99))
    parts = [*epochs, other, after]
    processes = [sorted(set(part[..., 1].ravel().tolist())) for part in parts]
    rows = [part[..., 0].tolist() for part in parts]
    del dataset, left, loader
    gc.collect()
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    return rows, processes, os.getpid(), len(multiprocessing.active_children())


@each_backend
def test_a_loader_keeps_its_worker_processes(backend):
    for index, (rows, processes, me, left) in enumerate(run(backend, NUM_WORKERS, in_worker_persistent)):
        expected = [[4 * step + 2 * index, 4 * step + 2 * index + 1] for step in range(12)]
        assert rows == [expected] * 4
        first, second, other, after = processes
        assert first == second == after
        assert len(first) == 2
        assert me not in first
        assert not set(other) & set(first)
        assert left == 0
