"""`kdist.nn`: parts of losses that add up to the loss of the global batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.processes import each_backend, run, strategy


def in_worker_losses(num_replicas):
    import keras

    import kdist

    chosen = strategy(num_replicas)
    ops = keras.ops
    losses = chosen.experimental_distribute_values_from_function(
        lambda context: np.arange(4, dtype="float32") + 10 * context.replica_id_in_sync_group
    )

    def step(losses):
        losses = ops.convert_to_tensor(losses)
        weights = [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(kdist.errors.InvalidArgumentError, match="one loss per row"):
            kdist.nn.compute_average_loss(ops.sum(losses))
        with pytest.raises(kdist.errors.InvalidArgumentError, match="not an integer"):
            kdist.nn.compute_average_loss(losses, global_batch_size=8.0)
        return (
            kdist.nn.compute_average_loss(losses),
            kdist.nn.compute_average_loss(losses, sample_weight=weights, global_batch_size=16),
            kdist.nn.compute_average_loss(ops.stack([losses, losses], axis=1), sample_weight=weights),
            kdist.nn.scale_regularization_loss([ops.ones(()), ops.ones(2)]),
        )

    parts = chosen.run(step, args=(losses,))
    with chosen.scope(), pytest.raises(kdist.errors.StrategyScopeError, match="outside of a replica"):
        kdist.nn.compute_average_loss(ops.ones(2))
    totals = chosen.reduce("SUM", parts, axis=None)
    alone = kdist.nn.compute_average_loss(ops.convert_to_tensor([1.0, 3.0]))
    return [float(ops.convert_to_numpy(total)) for total in (*totals, alone)]


@each_backend
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(1, 2), (1, 3), (2, 2)])
def test_parts_of_losses_add_up_to_the_mean_of_all_rows(backend, num_workers, num_replicas):
    rows = np.arange(4) + 10 * np.arange(num_replicas)[:, None]
    weights = np.array([0, 1, 2, 3])
    expected = [
        rows.mean(),
        (rows * weights).sum() / 16,
        2 * (rows * weights).sum() / rows.size,
        3.0,
        2.0,
    ]
    for result in run(backend, num_workers, in_worker_losses, num_replicas):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


class Taken(set):
    """A layer's set of addresses of deleted losses, where losses of other layers are now."""

    is_stale = True

    def __contains__(self, address):
        return self.is_stale or super().__contains__(address)

    def clear(self):
        self.is_stale = False
        super().clear()


def in_worker_added_losses():
    import keras

    chosen = strategy(2)
    with chosen.scope():
        layers = [keras.layers.ActivityRegularization(l1=factor) for factor in (1.0, 10.0, 100.0)]

    def step():
        for layer in layers:
            vars(layer)["_loss_ids"] = Taken()
        for layer in layers:
            layer(keras.ops.ones((1, 1)))
        return keras.ops.stack([sum(layer.losses) for layer in layers])

    totals = chosen.reduce("MEAN", chosen.run(step), axis=None)
    return keras.ops.convert_to_numpy(totals).tolist()


@pytest.mark.kills("losses_of_other_scopes_known")
@each_backend
def test_a_layer_drops_no_losses_that_others_added(backend):
    assert run(backend, 1, in_worker_added_losses) == [[1.0, 10.0, 100.0]]
