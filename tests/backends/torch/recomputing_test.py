"""The backward pass recomputes with the random numbers, the replica and the state of the forward pass."""

import contextlib

import numpy as np
import pytest

import kdist
from tests.backends.torch import dropped
from tests.backends.where import in_worker
from tests.helpers.foreign_backward import foreign_backward

if in_worker:
    import keras
    import torch

    from kdist import keras_hooks
    from tests.backends.torch.models import data, mirrored
    from tests.backends.torch.remat import WAYS, Dropping

REPLICAS = pytest.mark.parametrize("replicas", [1, 2, 3])
FOREIGN = pytest.mark.parametrize("is_foreign", [False, True], ids=["same-thread", "other-thread"])


@contextlib.contextmanager
def backward(is_foreign):
    with foreign_backward() if is_foreign else contextlib.nullcontext():
        yield


@pytest.mark.kills(torch_recomputed_masks_are_others="[2-same-thread-None-scope]")
@pytest.mark.parametrize("way", ["scope", "function", "nested"])
@pytest.mark.parametrize("seed", [None, 3])
@FOREIGN
@REPLICAS
def test_the_gradient_of_dropout_is_that_of_the_masks_of_the_forward_pass(replicas, is_foreign, seed, way):
    assert way in WAYS
    x, _ = data(24)
    with mirrored(replicas).scope():
        model = Dropping(way, seed)
        model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: keras.ops.mean(outputs, -1))
        model.build(x.shape)
    start = np.array(model.kernel)
    with backward(is_foreign):
        model.train_on_batch(x, x)
    masks = dropped.masks_of(model.records, x, start)
    assert 0 < masks.mean() < 1
    assert len({mask.tobytes() for mask in np.split(masks, replicas)}) == replicas
    np.testing.assert_allclose(
        start - np.array(model.kernel), dropped.gradient(x, masks), rtol=1e-4, atol=1e-5
    )
    if seed is not None or replicas > 1:  # otherwise Keras draws from PyTorch's own generator
        assert np.array(model.dropout.seed_generator.state)[1] == 1


@FOREIGN
def test_layers_inside_of_a_recomputed_layer_know_that_they_train(is_foreign):
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.dropout = keras.layers.Dropout(0.5)

        def call(self, x):
            return self.dropout(self.dense(x))

    x, y = data()
    with mirrored(2).scope():
        with keras.RematScope("full"):
            outer = Outer()
        model = keras.Sequential([outer, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with backward(is_foreign):
        assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()


@FOREIGN
def test_a_gradient_of_the_user_s_own_knows_its_replica(is_foreign):
    seen = []

    @keras.ops.custom_gradient
    def twice(x):
        def gradient(*args, upstream):
            context = kdist.get_replica_context()
            assert kdist.has_strategy()
            seen.append(context.replica_id_in_sync_group)
            return 2 * upstream

        return 2 * x, gradient

    class Twice(keras.layers.Layer):
        def call(self, x):
            return twice(x)

    x, y = data(6)
    with mirrored(3).scope():
        model = keras.Sequential([keras.layers.Dense(3), Twice(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    with backward(is_foreign):
        model.train_on_batch(x, y)
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.kills("torch_threads_keep_the_state_of_a_replica")
def test_threads_of_the_backward_pass_are_left_as_they_were():
    states = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            states.append((kdist.has_strategy(), keras_hooks.stateless_scope()))
            return gradient

    class Looking(keras.layers.Layer):
        def call(self, x):
            return Looks.apply(x)

    x, y = data()
    with mirrored(2).scope():
        layers = [keras.layers.Dense(4), Looking()]
        with keras.RematScope("full"):
            layers += [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    with foreign_backward():
        model.train_on_batch(x, y)
    # The backward pass had already recomputed the later layers.
    assert states == [(False, None)] * 2


@FOREIGN
def test_a_gradient_that_is_asked_for_after_the_step_does_not_wait_for_replicas(is_foreign):
    strategy = mirrored(2)
    with strategy.scope(), keras.RematScope("full"):
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
        model = keras.Sequential(layers)
    x = torch.tensor(data(8)[0])

    def step():
        return model(x, training=True).sum()

    losses = strategy.experimental_local_results(strategy.run(step))
    with (
        backward(is_foreign),
        pytest.raises(kdist.errors.StrategyScopeError, match="after the step of the replica"),
    ):
        losses[1].backward()
