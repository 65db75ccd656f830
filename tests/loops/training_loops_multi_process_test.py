"""The guide's custom training loop, from one source for three backends, and its native variants."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend, run, strategy
from tests.loops.clusters import each_cluster, each_cluster_of, number_of, numpy_of, on_workers, per_replica

BATCH, STEPS, RATE = 16, 20, 0.5


def guide_data():
    random = np.random.RandomState(0)
    x = random.randn(BATCH * STEPS, 1).astype("float32")
    return x, (x + 0.3 * random.randn(len(x), 1) > 0.2).astype("float32")


def guide_by_hand():
    """Computes logistic regression in NumPy; returns the losses, the weight `a` and the bias `b`."""
    x, y = (array.astype("float64")[:, 0] for array in guide_data())
    a, b, losses = 0.5, -0.25, []
    for start in range(0, len(x), BATCH):
        rows, labels = x[start : start + BATCH], y[start : start + BATCH]
        logits = a * rows + b
        losses.append(np.mean(np.logaddexp(0, logits) - labels * logits))
        error = (1 / (1 + np.exp(-logits)) - labels) / BATCH
        a, b = a - RATE * (error * rows).sum(), b - RATE * error.sum()
    return losses, a, b


def guide_model():
    import keras

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.5]]), np.array([-0.25])])
    return model


def guide_batches():
    x, y = guide_data()
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def portable_step(model, optimizer, loss_object):
    import keras

    def train_step(inputs):
        features, labels = inputs

        def compute_loss():
            per_example_loss = loss_object(labels, model(features, training=True))
            return keras.ops.sum(per_example_loss) / BATCH

        loss, gradients = kdist.value_and_grad(compute_loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def tape_step(model, optimizer, loss_object):
    import tensorflow as tf

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            per_example_loss = loss_object(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def backward_step(model, optimizer, loss_object):
    def train_step(inputs):
        features, labels = inputs
        model.zero_grad()
        loss = loss_object(labels, model(features, training=True)).sum() / BATCH
        loss.backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        return loss.detach()

    return train_step


def in_worker_guide(num_replicas, make_step, function):
    import keras

    if num_replicas == "default":
        s = kdist.get_strategy()
    else:
        s = kdist.OneDeviceStrategy("cpu:0") if num_replicas == 1 else strategy(num_replicas)
    with s.scope():
        model, optimizer = guide_model(), keras.optimizers.SGD(RATE)
        loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)
    train_step = make_step(model, optimizer, loss_object)

    @function()
    def distributed_train_step(dist_inputs):
        per_replica_losses = s.run(train_step, args=(dist_inputs,))
        return s.reduce(kdist.ReduceOp.SUM, per_replica_losses, axis=None)

    dataset = guide_batches() if num_replicas == "default" else guide_batches
    losses = [float(distributed_train_step(b)) for b in s.experimental_distribute_dataset(dataset)]
    return losses, numpy_of(model.get_weights()), number_of(optimizer.iterations)


def tf_function():
    import tensorflow as tf

    return tf.function


def eager():
    return lambda fn: fn


def check_guide(everyone):
    losses, a, b = guide_by_hand()
    assert losses[-1] < losses[0]
    for found, (kernel, bias), iterations in everyone:
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose([kernel[0, 0], bias[0]], [a, b], rtol=1e-5)
        assert iterations == STEPS


@pytest.mark.kills(jax_gradients_overwrite_each_other="[2-replicas-on-2-jax]")
@each_cluster
def test_the_guides_loop_gives_the_losses_of_one_device(backend, num_workers, num_replicas):
    check_guide(
        on_workers(backend, num_workers, num_replicas, in_worker_guide, portable_step, kdist.function)
    )


@each_backend
@pytest.mark.parametrize("num_replicas", ["default", 1])
def test_the_guides_loop_on_one_device(backend, num_replicas):
    check_guide(run(backend, 1, in_worker_guide, num_replicas, portable_step, kdist.function))


@pytest.mark.parametrize("function", [tf_function, eager], ids=["tf.function", "eager"])
@each_cluster_of("tensorflow")
def test_gradient_tape_gives_them_too(backend, num_workers, num_replicas, function):
    check_guide(on_workers(backend, num_workers, num_replicas, in_worker_guide, tape_step, function))


@each_cluster_of("torch")
def test_backward_gives_them_too(backend, num_workers, num_replicas):
    check_guide(on_workers(backend, num_workers, num_replicas, in_worker_guide, backward_step, eager))


# Optimizers, compared with Keras's own loop on one device ---------------------------------------------------


def optimizers():
    import keras

    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "clipnorm": keras.optimizers.SGD(0.1, clipnorm=0.05),
        "global_clipnorm": keras.optimizers.Adam(0.05, global_clipnorm=0.1),
        "clipvalue": keras.optimizers.SGD(schedule, momentum=0.9, clipvalue=0.02),
        "weight decay": keras.optimizers.AdamW(0.05, weight_decay=0.1),
        "average": keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
        "accumulation": keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
        "loss scale": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
    }


_alone: dict = {}  # in a worker, results that do not depend on the number of replicas


def in_worker_optimizers(num_replicas, names):
    import keras

    s = strategy(num_replicas)
    random = np.random.RandomState(0)
    x, y = random.randn(48, 3).astype("float32"), random.randn(48, 2).astype("float32")
    weights = [random.randn(*shape) for shape in ((3, 4), (4,), (4, 2), (2,))]

    def make(name):
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        model = keras.Sequential([keras.layers.Input((3,)), hidden, keras.layers.Dense(2)])
        model.set_weights(weights)
        return model, optimizers()[name]

    def state(model, optimizer):
        averages = getattr(optimizer, "_model_variables_moving_average", None) or []
        return numpy_of([variable.value for variable in [*model.weights, *averages]])

    def batches():
        for start in range(0, 48, 12):
            yield x[start : start + 12], y[start : start + 12]

    def custom(name):
        with s.scope():
            model, optimizer = make(name)

        def step(batch):
            features, labels = batch

            def loss_fn():
                errors = keras.ops.square(model(features, training=True) - labels)
                # The mean is over 2 outputs and 12 rows. The sum over replicas contains the penalty once.
                loss = keras.ops.sum(errors) / 24 + sum(model.losses) / num_replicas
                return optimizer.scale_loss(loss), loss

            variables = model.trainable_variables
            (_, loss), gradients = kdist.value_and_grad(loss_fn, variables, has_aux=True)()
            optimizer.apply(gradients, variables)
            return loss

        @kdist.function
        def train_step(batch):
            return s.reduce("SUM", s.run(step, args=(batch,)), axis=None)

        losses = [float(train_step(batch)) for batch in s.experimental_distribute_dataset(batches)]
        return losses, state(model, optimizer), number_of(optimizer.iterations)

    def alone(name):
        model, optimizer = make(name)
        model.compile(optimizer=optimizer, loss="mse")
        losses = [float(model.train_on_batch(*batch)) for batch in batches()]
        return losses, state(model, optimizer), number_of(optimizer.iterations)

    for name in names:
        if name not in _alone:
            _alone[name] = alone(name)
    return {name: (custom(name), _alone[name]) for name in names}


NAMES = ("clipnorm", "global_clipnorm", "clipvalue", "weight decay", "average", "accumulation", "loss scale")


@each_cluster
def test_optimizers_do_what_they_do_on_one_device(backend, num_workers, num_replicas):
    for found in on_workers(backend, num_workers, num_replicas, in_worker_optimizers, NAMES):
        for name, (
            (losses, state, iterations),
            (losses_alone, state_alone, iterations_alone),
        ) in found.items():
            np.testing.assert_allclose(losses, losses_alone, rtol=1e-5, err_msg=name)
            assert_close(state, state_alone, rtol=2e-5, atol=1e-6, where=name)
            assert iterations == iterations_alone


def in_worker_mean_losses(num_replicas):
    import keras

    s = strategy(num_replicas)
    loss_object = keras.losses.MeanSquaredError()
    x = per_replica(s, lambda i: np.arange(4, dtype="float32").reshape(2, 2) + i)

    def step(x):
        return loss_object(keras.ops.zeros_like(x), x)

    return float(s.reduce("SUM", s.run(step, args=(x,)), axis=None)), float(
        step(np.full((2, 2), 3, "float32"))
    )


@pytest.mark.kills(loss_of_a_loop_not_divided="torch")
@each_cluster
def test_the_sum_of_mean_losses_is_their_mean(backend, num_workers, num_replicas):
    expected = np.mean([(np.arange(4.0) + i) ** 2 for i in range(num_replicas)])
    for total, outside in on_workers(backend, num_workers, num_replicas, in_worker_mean_losses):
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        assert outside == 9


# Other loops ------------------------------------------------------------------------------------------------


def in_worker_gan(num_replicas, real, noise):
    """Trains generator a z + b and discriminator d x + c, with two discriminator steps per generator step."""
    import keras

    s = strategy(num_replicas)
    softplus, batch_size = keras.ops.softplus, real.shape[1]
    with s.scope():
        generator, discriminator = guide_model(), guide_model()
        slow, fast = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.5)

    def mean(values):
        return keras.ops.sum(values) / batch_size

    @kdist.function
    def discriminator_step(batch):
        def step(real, noise):
            def loss_fn():
                fake = generator(noise, training=True)
                return mean(softplus(-discriminator(real))) + mean(softplus(discriminator(fake)))

            loss, gradients = kdist.value_and_grad(loss_fn, discriminator.trainable_variables)()
            fast.apply(gradients, discriminator.trainable_variables)
            return loss

        return s.reduce("SUM", s.run(step, args=batch), axis=None)

    @kdist.function
    def generator_step(batch):
        def step(_, noise):
            def loss_fn():
                return mean(softplus(-discriminator(generator(noise, training=True))))

            loss, gradients = kdist.value_and_grad(loss_fn, generator.trainable_variables)()
            slow.apply(gradients, generator.trainable_variables)
            return loss

        return s.reduce("SUM", s.run(step, args=batch), axis=None)

    batches = iter(s.experimental_distribute_dataset(lambda: zip(real, noise, strict=True)))
    losses = []
    for _ in range(len(real) // 3):
        losses += [discriminator_step(next(batches)), discriminator_step(next(batches))]
        losses.append(generator_step(next(batches)))
    weights = numpy_of(generator.get_weights() + discriminator.get_weights())
    counts = (number_of(slow.iterations), number_of(fast.iterations))
    return [float(loss) for loss in losses], [float(w.reshape(())) for w in weights], counts


def gan_by_hand(real, noise):
    def softplus(x):
        return np.logaddexp(0, x)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    g, d, velocity, losses = np.array([0.5, -0.25]), np.array([0.5, -0.25]), np.zeros(2), []
    for i, (x, z) in enumerate(
        zip(real[..., 0].astype("float64"), noise[..., 0].astype("float64"), strict=True)
    ):
        fake = g[0] * z + g[1]
        on_real, on_fake = d[0] * x + d[1], d[0] * fake + d[1]
        if i % 3 < 2:
            losses.append(np.mean(softplus(-on_real)) + np.mean(softplus(on_fake)))
            of_real, of_fake = -sigmoid(-on_real), sigmoid(on_fake)
            d = d - 0.5 * np.array([np.mean(of_real * x + of_fake * fake), np.mean(of_real + of_fake)])
        else:
            losses.append(np.mean(softplus(-on_fake)))
            error = -sigmoid(-on_fake) * d[0]
            velocity = 0.9 * velocity - 0.1 * np.array([np.mean(error * z), np.mean(error)])
            g = g + velocity
    return losses, [*g, *d]


@each_cluster
def test_a_gan_with_two_steps_of_one_model_for_each_of_the_other(backend, num_workers, num_replicas):
    random = np.random.RandomState(4)
    real = (random.randn(12, 8, 1) + 2).astype("float32")  # 3 replicas do not divide these batches
    noise = random.randn(12, 8, 1).astype("float32")
    losses, weights = gan_by_hand(real, noise)
    for found, found_weights, counts in on_workers(
        backend, num_workers, num_replicas, in_worker_gan, real, noise
    ):
        np.testing.assert_allclose(found, losses, rtol=2e-5)
        np.testing.assert_allclose(found_weights, weights, rtol=2e-5)
        assert counts == (4, 8)
