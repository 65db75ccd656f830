"""Defines the jobs of the workers in these tests: a small transformer under strategies with shards."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tests.helpers.models import state_of

WORDS, LENGTH, WIDTH = 24, 6, 16
_strategies: dict[str, Any] = {}


def prepare(devices: int) -> None:
    """Makes the strategies of a pool's workers, before any computation."""
    import kdist

    names = [f"cpu:{i}" for i in range(devices)]
    workers = int(os.environ["WORLD_SIZE"])
    _strategies["fully"] = kdist.FullyShardedStrategy(names, min_size=2)
    _strategies["mirrored"] = (
        kdist.MirroredStrategy(names) if workers == 1 else kdist.MultiWorkerMirroredStrategy(devices=names)
    )
    number = _strategies["fully"].num_replicas_in_sync
    layouts = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
    attention = {".*query/kernel": (None, "model", None)}  # of the transformer
    for name, layout in {"model": layouts, "attention": layouts | attention}.items():
        mesh = {"batch": number // 2, "model": 2}
        _strategies[name] = kdist.ModelParallelStrategy(layout, mesh=mesh, devices=names)


def strategy(name: str) -> Any:
    if name == "local":
        import kdist

        return kdist.MirroredStrategy(["cpu:0", "cpu:1"])
    return _strategies[name]


def transformer(rate: float) -> Any:
    """Returns a model with four blocks, tied embeddings, BatchNormalization and Dropout."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(3)
    words = layers.ReversibleEmbedding(WORDS, WIDTH, name="words")
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = words(tokens)
    for block in range(4):
        attended = layers.MultiHeadAttention(2, 8, dropout=rate, name=f"attention_{block}")(x, x)
        x = layers.LayerNormalization(name=f"norm_{block}")(x + attended)
        inner = layers.Dense(32, activation="gelu", name=f"{block}_up")(x)
        x = x + layers.Dropout(rate)(layers.Dense(WIDTH, name=f"{block}_down")(inner))
        if block == 1:
            x = layers.BatchNormalization()(x)
    model = keras.Model(tokens, words(x, reverse=True))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def data(rows: int = 21) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows that neither two nor four replicas can split evenly."""
    tokens = np.random.RandomState(0).randint(0, WORDS, (rows, LENGTH + 1))
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def held(model: Any) -> float:
    """Returns the bytes of weights and optimizer state on the first device of this worker."""
    variables = {id(v): v for v in (*model.variables, *model.optimizer.variables)}
    return sum(held_of(v.value) for v in variables.values())


def step_memory(name: str) -> float:
    """Returns the memory of a training step per device, in units of one layer's weights. Only for JAX."""
    from unittest import mock

    import jax
    import keras

    compile_, needed = jax.jit, []

    def jit(*args: Any, **kwargs: Any) -> Any:
        program = compile_(*args, **kwargs)

        def call(*arguments: Any) -> Any:
            memory = program.lower(*arguments).compile().memory_analysis()
            needed.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
            return program(*arguments)

        return call

    with strategy(name).scope():
        layers = [keras.layers.Dense(64, use_bias=False) for _ in range(24)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")
    with mock.patch.object(jax, "jit", jit):
        model.fit(x, x, batch_size=16, verbose=0)
    return max(needed) / (64 * 64 * 4)


def held_of(value: Any) -> float:
    """Returns the bytes of a native value on the first device of this worker."""
    if hasattr(value, "addressable_shards"):  # JAX
        first = min(value.sharding.addressable_devices, key=lambda device: device.id)
        return sum(shard.data.nbytes for shard in value.addressable_shards if shard.device == first)
    local = value.to_local() if hasattr(value, "to_local") else value  # PyTorch
    return local.numel() * local.element_size()


def train(name: str | None, rate: float = 0.0) -> dict[str, Any]:
    """Trains the transformer under a strategy, or with plain Keras; returns the results and the memory."""
    import contextlib

    x, y = data()
    with contextlib.nullcontext() if name is None else strategy(name).scope():
        model = transformer(rate)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "losses": history.history["loss"],
        "evaluated": model.evaluate(x, y, batch_size=8, verbose=0),
        "predicted": model.predict(x, batch_size=8, verbose=0),
        "values": state_of(model),
        "bytes": held(model),
    }


def small(normalized: bool = True) -> Any:
    """Returns a small model that compiles quickly, for tests that do not need a transformer."""
    import keras

    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((LENGTH,)),
            keras.layers.Dense(8, activation="relu", name="up"),
            *([keras.layers.BatchNormalization()] if normalized else []),
            keras.layers.Dense(4, name="down"),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def rows(number: int = 21) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(1).rand(number, LENGTH).astype("float32")
    return x, x[:, :4] * 2


def save(
    name: str, folder: str, make_model: Any = small, make_rows: Any = rows
) -> tuple[str, str, list[np.ndarray]]:
    """Trains and saves a model as a checkpoint and as Keras's file; returns the paths and the values."""
    import kdist

    with strategy(name).scope():
        model = make_model()
    model.fit(*make_rows(), batch_size=8, shuffle=False, verbose=0)
    path = kdist.Checkpoint(model=model).save(os.path.join(folder, "checkpoints"))
    file = os.path.join(folder, "model.keras")
    model.save(file)
    return path, file, state_of(model)


def restore(name: str, path: str, file: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the state of a new model after a restored checkpoint, and of a loaded model."""
    import keras

    import kdist

    with strategy(name).scope():
        model = small()
    kdist.Checkpoint(model=model).restore(path)
    with strategy(name).scope():
        loaded = keras.saving.load_model(file)
    found = state_of(model), state_of(loaded)
    for each in (model, loaded):  # both can continue to train
        each.fit(*rows(), batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(state_of(model)[0], state_of(loaded)[0], rtol=1e-5, atol=1e-6)
    return found


def restore_checkpoint(name: str, path: str) -> list[np.ndarray]:
    """Returns the state of a new model after a checkpoint from any strategy, and continues to train."""
    import kdist

    with strategy(name).scope():
        model = small()
    kdist.Checkpoint(model=model).restore(path)
    found = state_of(model)
    model.fit(*rows(), batch_size=8, shuffle=False, verbose=0)
    return found


def loop(name: str) -> dict[str, Any]:
    """Runs a custom loop with uneven batches and a metric."""
    import keras

    import kdist

    ours = strategy(name)
    x, y = rows()
    with ours.scope():
        model = small(normalized=False)
        metric = keras.metrics.MeanSquaredError()
    variables = model.trainable_variables

    def step(batch: Any) -> Any:
        inputs, targets = batch

        def loss_fn() -> Any:
            predicted = model(inputs)
            return keras.ops.sum((predicted - targets) ** 2) / 32, predicted

        (loss, predicted), gradients = kdist.value_and_grad(loss_fn, variables, has_aux=True)()
        model.optimizer.apply(gradients, variables)
        metric.update_state(targets, predicted)
        return loss

    losses = []
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]
    for batch in ours.experimental_distribute_dataset(batches):
        kept = variables[0].value  # another reference to the array that the step would donate
        losses.append(float(ours.reduce("SUM", ours.run(step, args=(batch,)), axis=None)))
        assert not getattr(kept, "is_deleted", lambda: False)()
    return _told(losses, metric, model, x)


def plain_loop() -> dict[str, Any]:
    """Runs the same steps with plain Keras on one device, where the same sum is the loss."""
    import keras

    class Sum(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.sum((y_pred - y_true) ** 2, axis=-1) / 32

    x, y = rows()
    model = small(normalized=False)
    model.compile("adam", Sum(reduction="sum"))
    metric = keras.metrics.MeanSquaredError()
    losses = []
    for i in range(0, len(x), 8):
        batch = x[i : i + 8], y[i : i + 8]
        predicted = model(batch[0])
        metric.update_state(batch[1], predicted)
        losses.append(float(keras.ops.sum(keras.ops.subtract(predicted, batch[1]) ** 2) / 32))
        model.train_on_batch(*batch)
    return _told(losses, metric, model, x)


def _told(losses: list[float], metric: Any, model: Any, x: Any) -> dict[str, Any]:
    import keras

    first = model.trainable_variables[0]
    first.assign(first * 2)
    return {
        "losses": losses,
        "metric": float(metric.result()),
        "values": state_of(model),
        "called": keras.ops.convert_to_numpy(keras.ops.mean(model(x))),
    }


def assigned_weights(name: str | None) -> dict[str, Any]:
    """Trains a layer that assigns its kernel in each step."""
    import contextlib

    import keras

    keras.utils.set_random_seed(6)
    x = np.random.RandomState(1).randn(21, LENGTH).astype("float32")
    with contextlib.nullcontext() if name is None else strategy(name).scope():
        inner = keras.layers.Dense(8, activation="tanh", name="up")
        normalized = keras.layers.SpectralNormalization(inner, power_iterations=2)
        model = keras.Sequential([keras.Input((LENGTH,)), normalized, keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    history = model.fit(x, x[:, :4] * 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"losses": history.history["loss"], "values": state_of(model)}


def used_and_assigned_weights(name: str | None) -> dict[str, Any]:
    """Trains a layer that first uses its kernel, and then assigns a value that depends on the rows."""
    import contextlib

    import keras

    class Fading(keras.layers.Layer):
        def build(self, shape: tuple[int, ...]) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 8))

        def call(self, x: Any, training: bool = False) -> Any:
            y = keras.ops.matmul(x, self.kernel)
            if training:
                self.kernel.assign(0.9 * self.kernel + keras.ops.mean(y))
            return y

    keras.utils.set_random_seed(6)
    x = np.random.RandomState(1).randn(21, LENGTH).astype("float32")
    with contextlib.nullcontext() if name is None else strategy(name).scope():
        model = keras.Sequential([keras.Input((LENGTH,)), Fading(), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    history = model.fit(x, x[:, :4] * 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"losses": history.history["loss"], "values": state_of(model)}


def copied_weights(name: str | None) -> dict[str, Any]:
    """Trains with an optimizer that starts from copies of the weights."""
    import contextlib

    import keras

    with contextlib.nullcontext() if name is None else strategy(name).scope():
        model = small(normalized=False)
        model.compile(keras.optimizers.ScheduleFreeAdamW(0.05), "mse")
    history = model.fit(*rows(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"losses": history.history["loss"], "values": state_of(model)}


def averaged_weights(name: str | None) -> dict[str, Any]:
    """Trains twice. Each time, the weights become their averages in the end."""
    import contextlib

    import keras

    random = np.random.RandomState(2)
    x = random.randn(21, LENGTH).astype("float32")
    with contextlib.nullcontext() if name is None else strategy(name).scope():
        model = keras.Sequential([keras.Input((LENGTH,)), keras.layers.Dense(4, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    model.set_weights([random.randn(LENGTH, 4).astype("float32")])  # the same on all backends
    losses = []
    for _ in range(2):
        history = model.fit(x, x[:, :4] * 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses += history.history["loss"]
    return {"losses": losses, "values": state_of(model)}
