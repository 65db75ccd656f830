"""Data loaders and `PyDataset`s that shuffle have the order of plain Keras on two workers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.fit_multi_process_test import new_model
from tests.helpers.data import loader, make_data
from tests.helpers.processes import each_backend, rank, run, run_plain, scope, strategy


def in_worker_order_of_a_loader(has_generator, under_strategy):
    """Returns the order of the rows in three epochs, and the next random number."""
    import torch

    seen = []

    def collate(samples):
        seen.append([float(x[0]) for x, _ in samples])
        return torch.utils.data.default_collate(samples)

    x, y = make_data(12)
    model = new_model(under_strategy)
    torch.manual_seed(5 + strategy().runtime.worker_index if under_strategy else 5)
    own = torch.Generator().manual_seed(int(torch.randint(99, ()))) if has_generator else None
    data = loader(x, y, batch_size=4, shuffle=True, generator=own, collate_fn=collate)
    model.fit(data, epochs=3, verbose=0)
    return seen[-9:], float(torch.rand((), generator=own))


@pytest.mark.kills(data_loader_read_past_its_end="[True-jax]", data_loader_opened_late="[False-torch]")
@each_backend
@pytest.mark.parametrize("has_generator", [False, True])
def test_a_loader_shuffles_as_in_plain_keras(backend, has_generator):
    expected = run_plain(backend, in_worker_order_of_a_loader, has_generator, False)
    assert run(backend, 2, in_worker_order_of_a_loader, has_generator, True) == [expected] * 2


def in_worker_order_of_a_py_dataset(has_own_loss, under_strategy):
    """Returns the order of the batches in three epochs."""
    import random

    import keras

    class OwnLoss(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y - y_pred) ** 2)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            seen.append(index)
            return x[2 * index :][:2], y[2 * index :][:2]

    seen = []
    x, y = make_data(12)
    with scope(under_strategy):
        if has_own_loss:  # then only the optimizer has no variables yet, for which Keras reads no batch
            model = OwnLoss([keras.Input((x.shape[1],)), keras.layers.Dense(1)])
            model.compile("sgd")
        else:
            model = new_model(under_strategy)
    random.seed(5 + strategy().runtime.worker_index if under_strategy else 5)
    model.fit(Batches(), epochs=3, verbose=0)
    return seen[-18:]


@pytest.mark.kills(
    data_py_dataset_shuffled_to_build="[False-jax]", data_read_for_an_optimizer_alone="[True-torch]"
)
@each_backend
@pytest.mark.parametrize("has_own_loss", [False, True])
def test_a_py_dataset_shuffles_as_in_plain_keras(backend, has_own_loss):
    expected = run_plain(backend, in_worker_order_of_a_py_dataset, has_own_loss, False)
    assert sorted(expected) == sorted(3 * [*range(6)])
    assert run(backend, 2, in_worker_order_of_a_py_dataset, has_own_loss, True) == [expected] * 2


def in_worker_shuffled_without_a_seed(kind, library):
    """Returns the order of the rows in the last epochs, while only one worker draws numbers in a callback."""
    import random

    import keras
    import torch

    module = {"numpy": np.random, "python": random}[library]
    module.seed(rank())
    rows, seen = list(range(12)), []
    x = np.arange(12, dtype="float32")[:, None] * np.ones((12, 3), "float32")

    def draw(*_, **__):
        module.random() if rank() else None

    def shuffle(order):
        module.shuffle(order)
        seen.append(tuple(order))
        return order

    class Shuffled(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            mine = rows[2 * index :][:2]
            return x[mine], x[mine, :1]

    class Shuffling(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(shuffle([*range(12)]))

        def __len__(self):
            return 12

    if kind == "loader":
        data = loader(x, x[:, :1], batch_size=2, sampler=Shuffling())
    else:
        setattr(Shuffled, kind, lambda self: shuffle(rows))
        data = Shuffled()
    model = new_model()
    draws = keras.callbacks.LambdaCallback(on_train_batch_end=draw, on_epoch_end=draw)
    model.fit(data, epochs=3, verbose=0, shuffle=False, validation_data=data, callbacks=[draws])
    return seen[-4:]  # before, Keras also draws orders to find shapes


@pytest.mark.kills(
    data_shuffled_by_numpy="[on_epoch_begin-numpy-torch]",
    data_shuffle_alike_py_dataset="[on_epoch_begin-python-torch]",
    data_shuffled_at_the_end="[on_epoch_end-python-torch]",
    data_shuffled_by_a_sampler="[loader-python-torch]",
)
@each_backend
@pytest.mark.parametrize("library", ["numpy", "python"])
@pytest.mark.parametrize("kind", ["on_epoch_begin", "on_epoch_end", "loader"])
def test_datasets_that_shuffle_without_a_seed(backend, kind, library):
    first, second = run(backend, 2, in_worker_shuffled_without_a_seed, kind, library)
    assert first == second
    assert len(set(first)) == 4
