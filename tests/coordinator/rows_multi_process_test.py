"""Embeddings on kdist's own servers: only rows are sent, and the results match training on one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.coordinator.clusters import cluster, facts
from tests.helpers.scripts import Script

# On TensorFlow, kdist uses TensorFlow's servers.
each_own_backend = pytest.mark.parametrize("backend", ["jax", "torch"])

_MODELS = """
    import keras
    import numpy as np

    ROWS, STEPS, BATCH = 3000, 4, 16
    random = np.random.default_rng(5)
    x = random.integers(0, ROWS, (STEPS * BATCH, 3, 2)).astype("int32")
    x[:, 0] = x[:, 1]  # numbers that are there twice
    x[::3, 2] = 0
    y = random.normal(size=(len(x), 1)).astype("float32")
    SIZE = 8

    def pooled(tensor):
        return keras.ops.mean(keras.ops.reshape(tensor, (-1, 6, SIZE)), axis=1)

    class Lookups(keras.Model):
        "Two tables; one of them is looked up twice."

        def __init__(self, **options):
            super().__init__()
            self.one = keras.layers.Embedding(ROWS, SIZE, **options)
            self.two = keras.layers.Embedding(ROWS, SIZE, mask_zero=True)
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            again = self.one(x[:, 2:])
            return self.dense(pooled(self.one(x)) * pooled(self.two(x)) + keras.ops.sum(again, axis=(1, 2)))

    class Tied(Lookups):
        "A table that is looked up, and multiplied with."

        def call(self, x):
            scores = keras.ops.matmul(pooled(self.one(x)), keras.ops.transpose(self.one.embeddings))
            return self.dense(pooled(self.two(x))) + keras.ops.mean(scores**2, axis=1, keepdims=True)

    class Computed(Lookups):
        "Which rows of one table are looked up, the rows of another one say."

        def call(self, x):
            found = pooled(self.one(x))
            ids = keras.ops.cast(keras.ops.argmax(found, axis=1), "int32") + 7 * x[:, 0, 0] % ROWS
            return self.dense(found + self.two(ids % ROWS))

    class Scanned(Lookups):
        "Rows are looked up in a loop that is compiled."

        def call(self, x):
            def add(total, ids):
                return total + self.one(ids), None

            self.one.build(None)
            start = keras.ops.zeros((BATCH, SIZE)) + pooled(self.two(x))
            total, _ = keras.ops.scan(add, start, keras.ops.transpose(x[:, :, 0]))
            return self.dense(total)

    def made(kind, name):
        keras.utils.set_random_seed(3)
        optimizers = {
            "sgd": keras.optimizers.SGD(0.5),
            "adam": keras.optimizers.Adam(0.02),
            "clipped": keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1),
        }
        if kind == "regularised":
            model = Lookups(embeddings_regularizer=keras.regularizers.L2(0.01))
        elif kind == "frozen":
            model = Lookups()
            model.one.trainable = False
        else:
            model = {"lookups": Lookups, "tied": Tied, "computed": Computed, "scanned": Scanned}[kind]()
        model(x[:BATCH])  # builds it
        model.compile(optimizers[name], loss="mse")
        for weight in model.weights:  # larger than Keras begins: so are what gradients are
            weight.assign(10 * weight)
        return model
"""
# The model, the training loop, the optimizer, and the backends on which only rows are sent.
_BOTH, _TORCH, _NOWHERE = ("jax", "torch"), ("torch",), ()
_CASES = [
    ("lookups", "fit", "clipped", _BOTH),
    ("lookups", "loop", "adam", _BOTH),
    ("lookups", "halved", "sgd", _NOWHERE),
    ("frozen", "fit", "adam", _BOTH),
    ("tied", "fit", "adam", _NOWHERE),
    ("regularised", "loop", "sgd", _NOWHERE),
    ("computed", "loop", "adam", _TORCH),
    ("scanned", "fit", "sgd", _TORCH),
]
_PLAIN = f"""
    {_MODELS}
    for kind, way, name, *_ in {_CASES}:
        model = made(kind, name)
        if way == "halved":
            model.optimizer.learning_rate = 0.25
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        np.savez(f"plain-{{kind}}-{{way}}-{{name}}.npz", *model.get_weights())
"""
_OWN = f"""
    {_MODELS}
    strategy = kdist.ParameterServerStrategy(
        variable_partitioner=kdist.experimental.partitioners.FixedShardsPartitioner(2), max_staleness=0
    )
    coordinator = kdist.coordinator.ClusterCoordinator(strategy)
    loss_fn = keras.losses.MeanSquaredError()

    def moved():
        def count():
            servers = kdist.get_strategy()._task.served.servers
            return [sum(peer.received for peer in servers), sum(peer.sent for peer in servers)]

        return np.array(coordinator.fetch(coordinator.schedule(count)))

    def train(model, optimizer, factor):
        def step(x, y):
            def replica_fn(x, y):
                def loss():
                    return loss_fn(y, model(x, training=True)) + sum(model.losses)

                _, gradients = kdist.value_and_grad(loss, model.trainable_variables)()
                if factor != 1:
                    gradients = [factor * gradient for gradient in gradients]
                optimizer.apply(gradients, model.trainable_variables)

            strategy.run(replica_fn, args=(x, y))

        for i in range(STEPS):
            coordinator.schedule(step, args=(x[i * BATCH :][:BATCH], y[i * BATCH :][:BATCH]))
        coordinator.join()
"""
_TRAINED = f"""
    {_OWN}
    for kind, way, name, *_ in {_CASES}:
        with strategy.scope():
            model = made(kind, name)
        before = moved()
        if way == "fit":
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        else:
            train(model, model.optimizer, 0.5 if way == "halved" else 1)
        tell(moved=((moved() - before) / STEPS).tolist(), whole=4 * ROWS * SIZE)
        np.savez(f"own-{{kind}}-{{way}}-{{name}}.npz", *model.get_weights())
"""
_LARGE = f"""
    {_OWN}
    ROWS, BATCH = 1_000_000, 100
    x = random.integers(0, ROWS, (STEPS * BATCH, 10)).astype("int32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Embedding(ROWS, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("sgd", loss="mse")
    y = random.normal(size=(len(x), 1)).astype("float32")
    train(model, model.optimizer, 1)
    before = moved()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    tell(share=sum(moved() - before) / STEPS / (4 * 4 * ROWS))
"""


@pytest.mark.kills(
    ids_that_rows_say_are_found_before_them="[jax]",
    rows_are_asked_for_twice="[torch]",
    tied_tables_by_rows_alone="[jax]",
)
@each_own_backend
@pytest.mark.in_turn(4)
def test_rows_travel_and_the_numbers_are_those_of_one_device(backend: str, tmp_path: Path) -> None:
    with Script(tmp_path, "plain", _PLAIN, {"KERAS_BACKEND": backend}) as plain:
        with cluster(backend, tmp_path, num_workers=1) as tasks:
            chief = tasks.coordinate(_TRAINED).finish()
        plain.finish()
    for (kind, way, name, by_rows), found in zip(_CASES, facts(chief), strict=True):
        case = f"{kind}-{way}-{name}"
        with (
            np.load(tmp_path / f"own-{case}.npz") as own,
            np.load(tmp_path / f"plain-{case}.npz") as expected,
        ):
            assert len(own.files) == 4
            for file in own.files:
                np.testing.assert_allclose(own[file], expected[file], 1e-5, 1e-6, err_msg=case)
        share = max(found["moved"]) / found["whole"]  # type: ignore[call-overload]
        assert share < 0.1 if backend in by_rows else share > 1, (case, share)


@pytest.mark.kills(tables_travel_whole="[torch]")
@each_own_backend
@pytest.mark.in_turn(4)
def test_of_a_million_rows_one_percent_is_moved_at_most(backend: str, tmp_path: Path) -> None:
    with cluster(backend, tmp_path, num_workers=1) as tasks:
        chief = tasks.coordinate(_LARGE).finish()
        (found,) = facts(chief)
    assert found["share"] < 0.01  # type: ignore[operator]
