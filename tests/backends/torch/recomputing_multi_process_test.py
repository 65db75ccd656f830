"""Recomputation in the backward pass, on several workers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.backends.torch import dropped
from tests.helpers.foreign_backward import foreign_backward
from tests.helpers.processes import run, strategy


def in_worker_train(x, is_foreign):
    import keras

    from tests.backends.torch.remat import Dropping

    keras.utils.set_random_seed(3)
    with strategy().scope():
        model = Dropping("scope", None)
        model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: keras.ops.mean(outputs, -1))
        model.build(x.shape)
    start = np.array(model.kernel)
    with foreign_backward() if is_foreign else contextlib.nullcontext():
        model.train_on_batch(x, x)
    return dict(model.records), start, np.array(model.kernel)  # converts Keras's own class of dictionaries


@pytest.mark.parametrize("is_foreign", [False, True], ids=["same-thread", "other-thread"])
def test_the_gradient_of_dropout_is_that_of_the_masks_of_all_workers(is_foreign):
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    (first, start, end), (second, *others) = run("torch", 2, in_worker_train, x, is_foreign)
    masks = dropped.masks_of({0: first[0], 1: second[1]}, x, start)
    assert not np.array_equal(*np.split(masks, 2))
    np.testing.assert_allclose(start - end, dropped.gradient(x, masks), rtol=1e-4, atol=1e-5)
    for one, other in zip((start, end), others, strict=True):
        assert np.array_equal(one, other)
