"""Datasets read batches in other processes, and samplers without a length."""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np
import pytest

from tests.helpers import by_hand
from tests.helpers.processes import each_backend, run, strategy

EPOCHS = 2


class Rows:
    """All rows in their order; records the processes that read them. Spawned processes import this class."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return by_hand.ROWS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        note_reader(self.folder)
        x, y = by_hand.rows()
        return x[index], y[index]


def note_reader(folder: str) -> None:
    open(os.path.join(folder, str(os.getpid())), "w").close()


def in_worker_fit(kind: str, folder: str):
    """Returns the weights, this process's id, and its child processes that do not end."""
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return by_hand.STEPS

        def __getitem__(self, index: int):
            note_reader(folder)
            rows = slice(index * by_hand.BATCH, (index + 1) * by_hand.BATCH)
            return tuple(part[rows] for part in by_hand.rows())

    with strategy().scope():
        model = by_hand.model()
    if kind == "PyDataset":
        data = Batches(workers=2, use_multiprocessing=True)
    else:
        from torch.utils.data import DataLoader

        data = DataLoader(
            Rows(folder), batch_size=by_hand.BATCH, num_workers=1, multiprocessing_context="spawn"
        )
    model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0)
    del data
    weights = [float(v) for part in model.get_weights() for v in np.ravel(part)]
    # Keras closes a pool of processes without a wait for their end.
    deadline = time.monotonic() + 20
    while (children := multiprocessing.active_children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return weights, str(os.getpid()), [child.name for child in children]


def check(backend, kind, tmp_path):
    results = run(backend, 2, in_worker_fit, kind, str(tmp_path), timeout=150)
    readers = set(os.listdir(tmp_path))
    for weights, _, children in results:
        np.testing.assert_allclose(weights, by_hand.weights(EPOCHS), rtol=1e-5, atol=1e-6)
        assert children == []
    return readers, {pid for _, pid, _ in results}


@each_backend
def test_a_py_dataset_with_processes(backend, tmp_path):
    readers, workers = check(backend, "PyDataset", tmp_path)
    assert len(readers - workers) >= 2  # the worker reads the first batch to build the model


@pytest.mark.full  # each spawned process imports the backend again
@each_backend
def test_a_data_loader_with_spawned_processes(backend, tmp_path):
    readers, workers = check(backend, "DataLoader", tmp_path)
    assert len(readers - workers) >= 2 and not readers & workers


def in_worker_sampler_without_length(length: int) -> object:
    """Returns the rows that a distributed loader reads, or its error."""
    import itertools

    import torch

    from kdist.data.sources import torch_loader
    from kdist.errors import DatasetError

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            return itertools.islice(itertools.cycle(range(10)), length)

    torch_loader._MOST_INDICES = 1000
    rows = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None])
    loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=Sampler())
    try:
        parts = list(strategy().experimental_distribute_dataset(loader))
        return [np.ravel(strategy().gather(part[0], axis=0)).tolist() for part in parts]
    except DatasetError as error:
        return str(error)


@pytest.mark.kills(data_sampler_read_forever="[jax]")
@each_backend
def test_samplers_without_a_length(backend):
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert run(backend, 2, in_worker_sampler_without_length, 10) == [rows] * 2
    for error in run(backend, 2, in_worker_sampler_without_length, 1100):
        assert "has no length and may be infinite" in error and "Sampler" in error
