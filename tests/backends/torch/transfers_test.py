"""Copies between the host and the device per training step: each copy waits for all the work of a GPU.

The tests count calls of PyTorch's copy functions, which are the same on a CPU.
"""

import contextlib

import numpy as np
import pytest

from tests.backends.where import in_worker

if in_worker:
    import keras
    import torch

    from tests.backends.torch.models import mirrored

TO_HOST = ("item", "tolist", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__")


@contextlib.contextmanager
def counted():
    """Yields a list with an entry per transfer: a host value becomes a tensor, or the reverse."""
    found, patched, depth = [], [], []

    def patch(owner, name, is_transfer):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if not depth and is_transfer(args[0]):
                found.append(name)
            depth.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                depth.pop()

        patched.append((owner, name, original))
        setattr(owner, name, wrapper)

    for name in ("tensor", "as_tensor"):
        patch(torch, name, lambda value: not isinstance(value, torch.Tensor))
    for name in TO_HOST:
        patch(torch.Tensor, name, lambda value: True)
    try:
        yield found
    finally:
        for owner, name, original in patched:
            setattr(owner, name, original)


def transfers_per_step(strategy, blocks):
    """Returns the transfers per step of a model; each block has moving statistics and random numbers."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.layers.Input((5,))]
        for _ in range(blocks):
            layers += [
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.BatchNormalization(synchronized=bool(strategy)),
                keras.layers.Dropout(0.3),
                keras.layers.GaussianNoise(0.1),
            ]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    numbers = []
    # The first fit reads values that later steps reuse, and records a step.
    for steps in (2, 2, 6):
        rows = slice(10 * steps)
        with counted() as found:
            model.fit(x[rows], x[rows, :1], batch_size=10, shuffle=False, verbose=0)
        numbers.append(len(found))
    return (numbers[2] - numbers[1]) / 4


@pytest.mark.in_turn(3)
@pytest.mark.kills(torch_scalars_are_copied_to_the_device="[2]", torch_seeds_of_copies_are_read="[3]")
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_transfers_do_not_grow_with_depth_and_little_with_replicas(replicas):
    plain = transfers_per_step(None, 1)
    shallow, deep = (transfers_per_step(mirrored(replicas), blocks) for blocks in (1, 6))
    assert deep == shallow
    # Plain Keras also needs transfers to draw noise, so the bound is not tight.
    assert 0 < shallow <= plain + 3 * replicas


def test_transfers_do_not_grow_with_depth_where_one_device_holds_the_variables():
    import kdist

    strategy = kdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:1")
    assert transfers_per_step(strategy, 6) == transfers_per_step(strategy, 1)


@pytest.mark.kills("torch_seeds_outlive_what_is_written")
def test_seeds_that_somebody_sets_between_steps_are_drawn_from():
    def masks(strategy, restart):
        with strategy.scope() if strategy else contextlib.nullcontext():
            dropout = keras.layers.Dropout(0.5, seed=3)
            model = keras.Sequential([dropout, keras.layers.Identity()])
            model.compile("sgd", "mse")
        ones, seen = np.ones((8, 30), "float32"), []
        model.train_step = lambda data: seen.append(np.array(model(data[0], training=True))) or {}
        first = dropout.seed_generator.state.numpy() if restart is None else restart
        for _ in range(2):
            dropout.seed_generator.state.assign(first)
            model.train_on_batch(ones, ones)
            model.train_on_batch(ones, ones)
        return seen

    strategy = mirrored(2)
    with_replicas = masks(strategy, None)
    assert len(with_replicas) == 8
    for one, other in zip(with_replicas[:4], with_replicas[4:], strict=True):
        assert np.array_equal(one, other)
    assert len({mask.tobytes() for mask in with_replicas}) == 4
