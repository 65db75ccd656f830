"""Trains a small GAN with a custom loop, on any number of replicas and on any backend.

    kdist run --num-workers 2 gan.py [--steps 900]

The generator makes digits from noise, and the discriminator learns to tell them from real digits. One step trains both,
each with its own optimizer. The noise is part of the batch, so the losses do not depend on the number of replicas.
Worker 0 prints the losses. If matplotlib is installed, it draws the same eight noises at several steps to `gan.png`.

Needs: `pip install '.[tutorials]'` in a checkout of kdist. It takes about a minute on a CPU.

You can also train a GAN with `fit`: write the same step as the `train_step` of a model.
"""

import argparse
import importlib.util

import keras
import numpy as np
from sklearn.datasets import load_digits

import kdist

NOISE, PAIRS = 16, 64  # numbers per noise, rows per global batch


def real_digits():
    """The zeros and ones of scikit-learn, because a CPU learns two digits fast; pixels from -1 to 1."""
    images, labels = load_digits(return_X_y=True)
    return (images[labels < 2] / 8 - 1).astype("float32")


def batches(real, steps):
    random = np.random.default_rng(2)
    for _ in range(steps):
        rows = random.integers(0, len(real), PAIRS)
        yield real[rows], random.normal(size=(PAIRS, NOISE)).astype("float32")


def network(inputs, *units, activation):
    hidden = [keras.layers.Dense(size, activation="silu") for size in units[:-1]]
    return keras.Sequential(
        [keras.Input((inputs,)), *hidden, keras.layers.Dense(units[-1], activation=activation)]
    )


def train(strategy, steps, look=lambda step, generator: None):
    """Trains for a number of steps; returns the losses of both networks in each step.

    Before each step and after the last one, it calls `look` with the number of finished steps and the generator.
    """
    real = real_digits()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator = network(NOISE, 96, 96, 64, activation="tanh")
        discriminator = network(64, 96, 48, 1, activation=None)
        optimizers = [keras.optimizers.Adam(0.001, beta_1=0.5) for _ in range(2)]
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def average(target, logits):
        losses = cross_entropy(keras.ops.full_like(logits, target), logits)
        return kdist.nn.compute_average_loss(losses, global_batch_size=PAIRS)

    def replica_step(digits, noise):
        def discriminator_loss():
            made = generator(noise, training=True)
            return average(0.9, discriminator(digits)) + average(0.0, discriminator(made))

        def generator_loss():
            return average(1.0, discriminator(generator(noise, training=True)))

        losses = []
        for optimizer, model, loss_fn in zip(
            optimizers, (discriminator, generator), (discriminator_loss, generator_loss), strict=True
        ):
            loss, gradients = kdist.value_and_grad(loss_fn, model.trainable_variables)()
            optimizer.apply(gradients, model.trainable_variables)
            losses.append(loss)
        return losses

    @kdist.function
    def step(batch):
        losses = strategy.run(replica_step, args=batch)
        return [strategy.reduce("SUM", loss, axis=None) for loss in losses]

    history = []
    for done, batch in enumerate(strategy.experimental_distribute_dataset(lambda: batches(real, steps))):
        look(done, generator)
        history.append([float(loss) for loss in step(batch)])
    look(steps, generator)
    return np.array(history)


def draw(pictures, path):
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(len(pictures), 8, figsize=(6, 0.8 * len(pictures)))
    for line, (name, digits) in zip(axes, pictures.items(), strict=True):
        for ax, digit in zip(line, digits, strict=True):
            ax.imshow(digit.reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    fig.savefig(path, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description="Train a small GAN.")
    parser.add_argument("--steps", type=int, default=900, help="number of steps (default: 900)")
    steps = parser.parse_args().steps

    strategy = kdist.MultiWorkerMirroredStrategy()
    noise = np.random.default_rng(3).normal(size=(8, NOISE)).astype("float32")
    pictures = {}

    def look(step, generator):
        if step in (0, steps // 20, steps // 5, steps // 2, steps):
            pictures[f"after {step} steps"] = keras.ops.convert_to_numpy(generator(noise))

    history = train(strategy, steps, look)
    if strategy.cluster_resolver.task_id == 0:
        for name, losses in zip(("discriminator", "generator"), history.T, strict=True):
            print(f"{name}: loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last step")
        if importlib.util.find_spec("matplotlib"):
            draw(pictures | {"real": real_digits()[:8]}, "gan.png")
            print("pictures: gan.png")


if __name__ == "__main__":
    main()
