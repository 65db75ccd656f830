"""Axes that the replicas cannot divide evenly are sharded, with the results of one device."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import state_of
from tests.helpers.processes import full_unless, run_plain
from tests.sharding import jobs
from tests.sharding.sharded_multi_process_test import FOUR_DEVICES, TORCH_WORKERS, TWO_WORKERS, Pools, pools

__all__ = ["pools"]

FOUR_TORCH_WORKERS = ("torch", 4, 1)
PLACES = [TWO_WORKERS, FOUR_DEVICES, TORCH_WORKERS, FOUR_TORCH_WORKERS]
IDS = ["jax-2-workers", "jax-4-devices", "torch-2", "torch-4"]
# Neither two nor four replicas divide any axis. Of five rows, four workers hold two, two, one and zero rows.
WORDS, WIDTH, LENGTH = 13, 7, 5
OPTIMIZERS = ("adam", "lamb", "adafactor")
_PAIRS = {0: ["adam"], 1: ["adam", "adafactor"], 2: ["lamb"], 3: ["adam", "adafactor"]}
EACH_TRAINING = pytest.mark.parametrize(
    ("place", "optimizer"),
    [
        pytest.param(place, optimizer, marks=full_unless(optimizer in _PAIRS[i]), id=f"{IDS[i]}-{optimizer}")
        for i, place in enumerate(PLACES)
        for optimizer in OPTIMIZERS
    ],
)
EACH_LOOP = pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=full_unless(i % 2 == 1), id=IDS[i]) for i, place in enumerate(PLACES)],
)


def odd_model(optimizer: str) -> Any:
    import keras

    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, WIDTH),
            layers.Conv1D(5, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(11, activation="tanh"),
            layers.Dense(WORDS),
        ]
    )
    optimizers = {
        # These need the norm of a padded gradient, the mean of a padded square, and the statistics of its
        # rows.
        "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5, epsilon=1e-4),
        "lamb": lambda: keras.optimizers.Lamb(0.01, epsilon=1e-4),
        "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[optimizer](), loss)
    return model


def odd_data() -> tuple[np.ndarray, np.ndarray]:
    words = np.random.RandomState(2).randint(0, WORDS, (21, LENGTH + 1))
    return words[:, 1:].astype("int32"), words[:, 0].astype("int32")


def train(name: str | None, optimizer: str) -> dict[str, Any]:
    x, y = odd_data()
    with contextlib.nullcontext() if name is None else jobs.strategy(name).scope():
        model = odd_model(optimizer)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    large = [v for v in (*model.variables, *model.optimizer.variables) if np.prod(v.shape) > 50]
    return {
        "losses": history.history["loss"],
        "evaluated": model.evaluate(x, y, batch_size=8, verbose=0),
        "predicted": model.predict(x, batch_size=8, verbose=0),
        "values": state_of(model),
        "called": np.asarray(_numpy(model(x[:3]))),
        "shown": [tuple(v.value.shape) for v in large],
        "shapes": [tuple(v.shape) for v in large],
        "held": sum(_held(v) for v in large) if name else 0.0,
        "bytes": sum(4 * int(np.prod(v.shape)) for v in large),
    }


def _numpy(value: Any) -> Any:
    import keras

    return keras.ops.convert_to_numpy(value)


def _held(variable: Any) -> float:
    from kdist import keras_hooks

    return jobs.held_of(keras_hooks.native_value(variable))


@pytest.mark.kills(fully_sharded_uneven_axes_whole="[torch-4-adam]", torch_padding_in_a_part="[torch-4-adam]")
@EACH_TRAINING
@pytest.mark.in_turn(3)
def test_an_axis_that_replicas_do_not_divide_is_padded(place: Any, optimizer: str, pools: Pools) -> None:
    expected = run_plain(place[0], train, None, optimizer)
    # Of 13 rows, the first of four workers holds four; of five rows, it holds two.
    share = {2: 0.56, 4: 0.36}[place[1] * place[2]]
    everyone = pools.run(place, train, "fully", optimizer)
    if place[0] == "torch":  # only JAX pads
        assert sum(actual["held"] for actual in everyone) == expected["bytes"]
    for actual in everyone:
        for key in ("losses", "evaluated", "predicted", "values", "called"):
            assert_close(actual[key], expected[key], atol=5e-6, where=key)
        assert actual["shown"] == actual["shapes"] == expected["shapes"]
        assert actual["held"] <= share * expected["bytes"]


def save(folder: str) -> tuple[str, str, list[np.ndarray]]:
    return jobs.save("fully", folder, lambda: odd_model("adam"), odd_data)


def restore(path: str, file: str | None) -> list[Any]:
    """Returns the state of a new model after a checkpoint and after Keras's file, and its next results."""
    import keras

    import kdist

    with jobs.strategy("fully").scope():
        model = odd_model("adam")
    kdist.Checkpoint(model=model).restore(path)
    found = [state_of(model)]
    if file is not None:
        with jobs.strategy("fully").scope():
            found.append(state_of(keras.saving.load_model(file)))
    model.fit(*odd_data(), batch_size=8, shuffle=False, verbose=0)
    return [*found, state_of(model)]


def load_plain(file: str) -> list[np.ndarray]:
    import keras

    model = keras.saving.load_model(file)
    values = state_of(model)
    model.fit(*odd_data(), batch_size=8, shuffle=False, verbose=0)
    return [values, state_of(model)]


@pytest.mark.kills("saved_parts_with_padding")
@pytest.mark.in_turn(4)
def test_files_have_no_padding_and_any_number_of_workers_reads_them(pools: Pools, tmp_path: Path) -> None:
    for i, (place, other) in enumerate(zip(PLACES, [*PLACES[1:], PLACES[0]], strict=True)):
        folder = tmp_path / str(i)
        folder.mkdir()
        path, file, values = pools.run(place, save, str(folder))[0]
        loaded, continued = run_plain(place[0], load_plain, file)
        assert_equal(loaded, values)
        is_same_backend = other[0] == place[0]
        for found in pools.run(other, restore, path, file if is_same_backend else None):
            for restored in found[:-1]:
                assert_equal(restored, values)
            if is_same_backend:
                assert_close(found[-1], continued, atol=5e-6)


def loop() -> dict[str, Any]:
    """Runs a custom loop, and assigns, reads and shows values."""
    import keras

    import kdist

    strategy = jobs.strategy("fully")
    with strategy.scope():
        model = odd_model("adam")
    x, y = odd_data()
    variables = model.trainable_variables

    def step(batch: Any) -> Any:
        inputs, targets = batch

        def loss_fn() -> Any:
            losses = keras.losses.sparse_categorical_crossentropy(targets, model(inputs), from_logits=True)
            return keras.ops.sum(losses) / 8

        loss, gradients = kdist.value_and_grad(loss_fn, variables)()
        model.optimizer.apply(gradients, variables)
        return loss

    losses = []
    for batch in strategy.experimental_distribute_dataset(
        [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]
    ):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
    table = variables[0]
    values = state_of(model)
    table.assign(table * 2)
    table.assign_add(np.ones(table.shape, "float32"))
    return {
        "losses": losses,
        "values": values,
        "assigned": _numpy(table),
        "called": _numpy(model(x[:3])),
        "shown": repr(table),
    }


def plain_loop() -> dict[str, Any]:
    import keras

    model = odd_model("adam")

    class Sum(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True) / 8

    model.compile(model.optimizer, Sum(reduction="sum"))
    x, y = odd_data()
    losses = [float(model.train_on_batch(x[i : i + 8], y[i : i + 8])) for i in range(0, len(x), 8)]
    table = model.trainable_variables[0]
    values = state_of(model)
    table.assign(table * 2 + 1)
    return {"losses": losses, "values": values, "assigned": _numpy(table), "called": _numpy(model(x[:3]))}


@pytest.mark.kills(jax_padding_shown="[jax-4-devices]")
@EACH_LOOP
@pytest.mark.in_turn(4)
def test_a_loop_of_the_user_s_sees_no_padding(place: Any, pools: Pools) -> None:
    expected = run_plain(place[0], plain_loop)
    for actual in pools.run(place, loop):
        for key in ("values", "assigned", "called"):
            assert_close(actual[key], expected[key], atol=5e-6, where=key)
        # `train_on_batch` returns the running mean of the losses.
        assert_close(actual["losses"][0], expected["losses"][0], atol=5e-6)
        assert f"shape=({WORDS}, {WIDTH})" in actual["shown"]
        assert actual["shown"].count("[") in (0, WORDS + 1)  # all rows of the value, or no rows
