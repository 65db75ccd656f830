"""Models with a custom `train_step` and without `call`, such as the GANs and VAEs in Keras's guides."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend, run, run_plain, scope


def gan(backend: str) -> Any:
    """Returns a GAN class with two networks and two optimizers. Generated rows have label 1, real rows label 0."""
    import keras
    from keras import ops

    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    class GAN(keras.Model):
        def __init__(self, discriminator: Any, generator: Any) -> None:
            super().__init__()
            self.discriminator, self.generator = discriminator, generator
            self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")
            # On TensorFlow, only the first optimizer scales its loss.
            scales = {"tensorflow": (4.0, None), "torch": (4.0, 4.0), "jax": (None, None)}[backend]
            self.d_optimizer = keras.optimizers.SGD(0.25, loss_scale_factor=scales[0])
            self.g_optimizer = (
                keras.optimizers.Adam(0.02, loss_scale_factor=scales[1]) if backend != "jax" else None
            )
            self.built = backend != "tensorflow"  # all backends except TensorFlow check it

        @property
        def metrics(self) -> Any:
            return [self.d_loss, self.g_loss]

        def loss_of_discriminator(self, judge: Any, generate: Any, real: Any, noise: Any) -> Any:
            both = ops.concatenate([ops.stop_gradient(generate(noise)), real], axis=0)
            ones = ops.ones((ops.shape(real)[0], 1))
            return loss_of(ops.concatenate([ones, 0 * ones], axis=0), judge(both))

        def loss_of_generator(self, judge: Any, generate: Any, noise: Any) -> Any:
            judged = judge(generate(noise))
            return loss_of(ops.zeros_like(judged), judged)

        def logs(self) -> Any:
            return {metric.name: metric.result() for metric in self.metrics}

    class Tensorflow(GAN):
        def predict_step(self, data: Any) -> Any:
            return self.generator(keras.utils.unpack_x_y_sample_weight(data)[0])

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            real, noise = data
            with tf.GradientTape() as tape:
                d_loss = self.loss_of_discriminator(self.discriminator, self.generator, real, noise)
                scaled = self.d_optimizer.scale_loss(d_loss)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(scaled, [w.value for w in weights]), weights)
            generator = functools.partial(self.generator, training=True)
            with tf.GradientTape() as tape:
                g_loss = self.loss_of_generator(self.discriminator, generator, noise)
            weights = self.generator.trainable_weights
            self.g_optimizer.apply(tape.gradient(g_loss, [w.value for w in weights]), weights)
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return self.logs()

    class Torch(GAN):
        def train_step(self, data: Any) -> Any:
            import torch

            real, noise = data
            d_loss = self.loss_of_discriminator(self.discriminator, self.generator, real, noise)
            g_loss = self.loss_of_generator(self.discriminator, self.generator, noise)
            # Both losses are scaled before the first update.
            scaled = self.g_optimizer.scale_loss(g_loss), self.d_optimizer.scale_loss(d_loss)
            networks = self.generator, self.discriminator
            gradients = [self._gradients(*pair) for pair in zip(scaled, networks, strict=True)]
            with torch.no_grad():
                self.g_optimizer.apply(gradients[0], self.generator.trainable_weights)
                self.d_optimizer.apply(gradients[1], self.discriminator.trainable_weights)
                self.d_loss.update_state(d_loss)
                self.g_loss.update_state(g_loss)
            return self.logs()

        def _gradients(self, loss: Any, network: Any) -> Any:
            self.zero_grad()
            loss.backward()
            return [w.value.grad.clone() for w in network.trainable_weights]

    class Jax(GAN):
        """A GAN with one optimizer, because on JAX the state of a step in Keras contains only one optimizer."""

        def train_step(self, state: Any, data: Any) -> Any:  # type: ignore[override]
            import jax

            real, noise = data
            trainable, fixed, optimizer, metrics = state
            size = len(self.discriminator.trainable_variables)

            def network(part: Any, values: Any) -> Any:
                return lambda x: part.stateless_call(values, [], x)[0]

            def d_loss(mine: Any, others: Any) -> Any:
                parts = network(self.discriminator, mine), network(self.generator, others)
                return self.loss_of_discriminator(*parts, real, noise)

            def g_loss(mine: Any, others: Any) -> Any:
                return self.loss_of_generator(
                    network(self.discriminator, others), network(self.generator, mine), noise
                )

            first, gradients = jax.value_and_grad(d_loss)(trainable[:size], trainable[size:])
            gradients += [ops.zeros_like(value) for value in trainable[size:]]
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            second, gradients = jax.value_and_grad(g_loss)(trainable[size:], trainable[:size])
            gradients = [ops.zeros_like(value) for value in trainable[:size]] + gradients
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs, states = {}, []
            for index, (metric, value) in enumerate(zip(self.metrics, (first, second), strict=True)):
                states += metric.stateless_update_state(metrics[2 * index : 2 * index + 2], value)
                logs[metric.name] = metric.stateless_result(states[-2:])
            return logs, (trainable, fixed, optimizer, states)

    return {"tensorflow": Tensorflow, "torch": Torch, "jax": Jax}[backend]


def make_gan(are_built: bool, under_strategy: bool, seed: int = 0) -> Any:
    """Returns a compiled GAN, real rows, and noise."""
    import keras

    backend = keras.backend.backend()
    random = np.random.RandomState(0)
    real, noise = random.randn(23, 2).astype("float32"), random.randn(23, 3).astype("float32")
    keras.utils.set_random_seed(seed)
    with scope(under_strategy):
        discriminator = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        generator = keras.Sequential([keras.layers.Dense(3, "tanh")])
        if backend == "tensorflow":  # the backward pass sums over the replicas, with their weights
            generator.add(keras.layers.BatchNormalization(synchronized=True))
        generator.add(keras.layers.Dense(2))
        if are_built:
            discriminator.build((None, 2))
            generator.build((None, 3))
        model = gan(backend)(discriminator, generator)
        model.compile(model.d_optimizer if backend == "jax" else "sgd")
    return model, real, noise


def trains_a_gan(are_built: bool, under_strategy: bool) -> Any:
    import keras

    model, real, noise = make_gan(are_built, under_strategy)
    predicts = keras.backend.backend() == "tensorflow"  # other backends need a `call`
    before = model.predict(noise, batch_size=5, verbose=0) if predicts else 0.0
    history = model.fit(real, noise, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    after = model.predict(noise, batch_size=5, verbose=0) if predicts else 0.0
    return before, history, after, model.discriminator.get_weights(), model.generator.get_weights()


def vae(backend: str) -> Any:
    """Returns a VAE class. The noise is part of the data, because replicas draw different random numbers."""
    import keras
    from keras import ops

    class VAE(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            data = keras.Input((6,))
            hidden = layers.Dense(5, "relu")(data)
            parts = [layers.Dense(2, name=name)(hidden) for name in ("mean", "log_variance")]
            self.encoder = keras.Model(data, parts)
            self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(5, "relu"), layers.Dense(6)])
            names = ("loss", "reconstruction", "divergence")
            self.trackers = [keras.metrics.Mean(name=name) for name in names]
            self.built = backend != "tensorflow"  # all backends except TensorFlow check it

        @property
        def metrics(self) -> Any:
            return self.trackers

        def losses_of(self, encode: Any, decode: Any, data: Any) -> Any:
            x, noise = data
            mean, log_variance = encode(x)
            made = decode(mean + ops.exp(0.5 * log_variance) * noise)
            reconstruction = ops.mean(ops.sum(ops.square(x - made), axis=1))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=1))
            return reconstruction + divergence, reconstruction, divergence

        def updated(self, losses: Any) -> Any:
            for tracker, loss in zip(self.trackers, losses, strict=True):
                tracker.update_state(loss)
            return {tracker.name: tracker.result() for tracker in self.trackers}

        def test_step(self, data: Any) -> Any:
            return self.updated(self.losses_of(self.encoder, self.decoder, data))

    class Tensorflow(VAE):
        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                losses = self.losses_of(self.encoder, self.decoder, data)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(losses[0], weights), weights, strict=True))
            return self.updated(losses)

    class Torch(VAE):
        def train_step(self, data: Any) -> Any:
            import torch

            self.zero_grad()
            losses = self.losses_of(self.encoder, self.decoder, data)
            losses[0].backward()
            with torch.no_grad():
                self.optimizer.apply([w.value.grad for w in self.trainable_weights], self.trainable_weights)
                return self.updated(losses)

    class Jax(VAE):
        def stateless_losses(self, trainable: Any, data: Any) -> Any:
            size = len(self.encoder.trainable_variables)
            losses = self.losses_of(
                lambda x: self.encoder.stateless_call(trainable[:size], [], x)[0],
                lambda z: self.decoder.stateless_call(trainable[size:], [], z)[0],
                data,
            )
            return losses[0], losses

        def tracked(self, metrics: Any, losses: Any) -> Any:
            logs, states = {}, []
            for index, (tracker, loss) in enumerate(zip(self.trackers, losses, strict=True)):
                states += tracker.stateless_update_state(metrics[2 * index : 2 * index + 2], loss)
                logs[tracker.name] = tracker.stateless_result(states[-2:])
            return logs, states

        def train_step(self, state: Any, data: Any) -> Any:  # type: ignore[override]
            import jax

            trainable, fixed, optimizer, metrics = state
            gradient = jax.value_and_grad(self.stateless_losses, has_aux=True)
            (_, losses), gradients = gradient(trainable, data)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs, metrics = self.tracked(metrics, losses)
            return logs, (trainable, fixed, optimizer, metrics)

        def test_step(self, state: Any, data: Any) -> Any:  # type: ignore[override]
            trainable, fixed, metrics = state
            logs, metrics = self.tracked(metrics, self.stateless_losses(trainable, data)[1])
            return logs, (trainable, fixed, metrics)

    return {"tensorflow": Tensorflow, "torch": Torch, "jax": Jax}[backend]


def trains_a_vae(_: bool, under_strategy: bool) -> Any:
    import keras

    random = np.random.RandomState(1)
    x, noise = random.randn(23, 6).astype("float32"), random.randn(23, 2).astype("float32")
    keras.utils.set_random_seed(1)
    with scope(under_strategy):
        model = vae(keras.backend.backend())()
        model.compile(keras.optimizers.Adam(0.02))
    arguments = {"batch_size": 5, "verbose": 0}
    history = model.fit(
        x, noise, epochs=2, shuffle=False, validation_data=(x[:7], noise[:7]), **arguments
    ).history
    values = model.evaluate(x, noise, return_dict=True, **arguments)
    return history, values, model.encoder.get_weights(), model.decoder.get_weights()


@pytest.fixture(scope="module")
def plain() -> dict[Any, Any]:
    """A cache for the results of plain Keras."""
    return {}


@pytest.mark.kills(
    own_steps_need_a_call="[trains_a_gan-1-tensorflow]",
    scale_of_one_optimizer_weights_losses_of_another="[trains_a_gan-2-tensorflow]",
)
@each_backend
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("trains", [trains_a_gan, trains_a_vae])
def test_it_trains_as_on_one_device(
    backend: str, num_workers: int, trains: Any, plain: dict[Any, Any]
) -> None:
    if (backend, trains) not in plain:
        plain[backend, trains] = run_plain(backend, trains, True, False)
    assert_close(
        run(backend, num_workers, trains, True, True), [plain[backend, trains]] * num_workers, rtol=1e-4
    )


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_sub_models_may_be_built_by_the_step_where_keras_allows_it(num_workers: int) -> None:
    expected = run_plain("tensorflow", trains_a_gan, False, False)
    assert_close(
        run("tensorflow", num_workers, trains_a_gan, False, True), [expected] * num_workers, rtol=1e-4
    )


def resumes_a_gan(folder: str, under_strategy: bool) -> Any:
    """Returns the weights after two epochs. Under a strategy, the second one runs in another model."""
    import kdist

    for seed, epochs in ((0, 1), (1, 2)) if under_strategy else ((0, 2),):
        model, real, noise = make_gan(True, under_strategy, seed)
        backup = kdist.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        callbacks = [backup] if under_strategy else []
        model.fit(real, noise, batch_size=5, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model.discriminator.get_weights(), model.generator.get_weights()


@pytest.mark.kills("backups_without_other_optimizers", "backups_forget_what_optimizers_train")
@each_backend
def test_a_resumed_gan_keeps_the_state_of_its_optimizers(backend: str, tmp_path: Any) -> None:
    expected = run_plain(backend, resumes_a_gan, str(tmp_path), False)
    assert_close(run(backend, 2, resumes_a_gan, str(tmp_path), True), [expected] * 2, rtol=1e-4)


def saves_an_uncalled_model(folder: str) -> str:
    """Returns the error for a model with `call` that was not called, although its layers are built."""
    import keras

    import kdist

    class Uncalled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

        def call(self, x: Any) -> Any:
            return self.inner(x)

    with pytest.raises(kdist.errors.CheckpointError) as caught:
        kdist.Checkpoint(model=Uncalled()).save(folder)
    return str(caught.value)


@pytest.mark.kills("checkpoint_of_models_that_were_not_called")
@each_backend
def test_a_model_that_was_not_called_cannot_be_saved(backend: str, tmp_path: Any) -> None:
    assert "call it on a batch first" in run(backend, 1, saves_an_uncalled_model, str(tmp_path))[0]
