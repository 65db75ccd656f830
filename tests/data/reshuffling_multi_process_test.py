"""`tf.data` pipelines that reshuffle keep tf.data's order on two workers, with each row once per epoch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.models import network
from tests.helpers.processes import each_backend, run, strategy

ROWS, EPOCHS = 22, 3  # batches of 4, with a last batch of 2


def pipeline(reshuffles):
    import tensorflow as tf

    tf.random.set_seed(1)  # another test may have given the workers different seeds
    rows = tf.data.Dataset.range(1, ROWS + 1).map(lambda i: tf.cast(i, tf.float32)[None])
    return rows.shuffle(ROWS, seed=3, reshuffle_each_iteration=reshuffles).batch(4)


def own_orders(reshuffles, epochs=EPOCHS):
    """Returns the batches of each epoch in TensorFlow's own order."""
    dataset = pipeline(reshuffles)
    return [[batch.numpy() for batch in dataset] for _ in range(epochs)]


def iterate(reshuffles):
    import keras

    distributed = strategy().experimental_distribute_dataset(pipeline(reshuffles))
    return [
        [
            np.concatenate([keras.ops.convert_to_numpy(part) for part in local_parts(batch)])
            for batch in distributed
        ]
        for _ in range(EPOCHS)
    ]


def local_parts(batch):
    return strategy().experimental_local_results(batch)


def fit(reshuffles):
    """Returns the weights of two workers, of one device, and of one device that repeats the first order."""

    def trained(scope, data, **arguments):
        model = network(1, inputs=1, rate=0.001, seed=5, scope=scope)
        model.fit(data, epochs=EPOCHS, verbose=0, **arguments)
        return np.concatenate([np.ravel(weight) for weight in model.get_weights()])

    def target(rows):
        return 3.0 / rows  # no line fits these targets, so the result depends on the order of the rows

    import contextlib

    # `fit` uses up the first of TensorFlow's orders, because it looks at the data before it trains.
    orders = own_orders(reshuffles, EPOCHS + 1)[1:]
    batches = [(rows, target(rows)) for epoch in orders for rows in epoch]
    again = [(rows, target(rows)) for _ in orders for rows in orders[0]]
    steps = {"steps_per_epoch": len(orders[0])}
    return (
        trained(strategy().scope(), pipeline(reshuffles).map(lambda rows: (rows, target(rows)))),
        trained(contextlib.nullcontext(), (batch for batch in batches), **steps),
        trained(contextlib.nullcontext(), (batch for batch in again), **steps),
    )


@each_backend
@pytest.mark.parametrize("reshuffles", [True, False])
def test_each_epoch_has_the_order_of_tf_data_and_each_row_once(backend, reshuffles):
    orders = run(backend, 2, own_orders, reshuffles)[0]
    first, second = run(backend, 2, iterate, reshuffles)
    for epoch, own in enumerate(orders):
        delivered = [np.concatenate(parts) for parts in zip(first[epoch], second[epoch], strict=True)]
        assert [len(batch) for batch in delivered] == [4, 4, 4, 4, 4, 2]
        assert [batch.tolist() for batch in delivered] == [batch.tolist() for batch in own]
        assert sorted(np.concatenate(delivered)[:, 0]) == list(range(1, ROWS + 1))
    different = {tuple(np.concatenate(epoch)[:, 0]) for epoch in orders}
    assert len(different) == (EPOCHS if reshuffles else 1)


@each_backend
def test_fit_trains_in_the_orders_of_tf_data(backend):
    for reshuffles in (True, False):
        for workers, one_device, same_order in run(backend, 2, fit, reshuffles):
            np.testing.assert_allclose(workers, one_device, 1e-5)
            # The weights depend on the order: with the first epoch's order in every epoch, they differ.
            assert np.allclose(one_device, same_order, 1e-4) != reshuffles
