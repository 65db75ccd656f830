"""Variables, metrics and optimizers outside of replicas: every way to use them has the results of plain Keras."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import BACKENDS, full_unless, run, run_plain
from tests.ways import WAYS


def in_worker(folder: str, under_strategy: bool) -> dict[str, dict[str, Any]]:
    """Returns the result of each way to use a variable inside of a scope, after it, and in a callback of `fit`."""
    import keras

    from tests.ways.things import Things, try_way

    keras.utils.set_random_seed(1)
    if under_strategy:
        from tests.helpers.processes import strategy

        scope = strategy().scope
    else:
        scope = contextlib.nullcontext
    found: dict[str, dict[str, Any]] = {place: {} for place in ("inside", "outside", "callback")}
    for name in WAYS:
        with scope():
            things = Things(folder)
            found["inside"][name] = try_way(name, things)
            things = Things(folder)
        found["outside"][name] = try_way(name, things)
    with scope():
        things = Things(folder)
        things.model.fit(
            things.x, things.x[:, :1], epochs=2, verbose=0, callbacks=[trying(folder, found["callback"])]
        )
    found["after"] = {"weights": seen_of(things)}
    return found


def seen_of(things: Any) -> Any:
    from tests.ways.things import seen

    optimizer = things.model.optimizer
    return seen(
        [things.weights(), float(optimizer.learning_rate), int(optimizer.iterations), optimizer.variables]
    )


def trying(folder: str, found: dict[str, Any]) -> Any:
    """Returns a callback. The class is local, because the process of pytest must not import Keras."""
    import keras

    from tests.ways.things import Things, try_way

    class Callback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Uses the optimizer of the model in training.
            optimizer = self.model.optimizer
            found.setdefault("steps", []).append([float(optimizer.learning_rate), int(optimizer.iterations)])
            optimizer.learning_rate = float(optimizer.learning_rate) / 2

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].bias.assign_add([0.25])
            if epoch == 0:
                found.update({name: try_way(name, Things(folder)) for name in WAYS})

    return Callback()


def differences(actual: Any, expected: Any) -> list[str]:
    return [
        f"{place}, {way}: {actual[place].get(way)}, not {result}"
        for place, results in expected.items()
        for way, result in results.items()
        if not is_close(actual[place].get(way), result)
    ]


def is_close(actual: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return isinstance(actual, float) and bool(np.isclose(actual, expected, rtol=1e-5, atol=1e-6))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(is_close(actual[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(is_close, actual, expected))
    return type(actual) is type(expected) and actual == expected


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """A cache for the results of plain Keras on each backend."""
    return {}


# TensorFlow traces each way separately, and needs half a minute for each number of workers.
PAIRS = [(backend, number) for backend in BACKENDS for number in (1, 2)]
FULL = {("tensorflow", 2), ("jax", 1)}


@pytest.mark.kills(
    saving_variables_of_keras_counted="[torch-2]",
    tensorflow_optimizers_outside_of_replicas="[tensorflow-1]",
    tensorflow_scope_is_the_native_one="[tensorflow-1]",
)
@pytest.mark.parametrize(
    ("backend", "num_workers"), [pytest.param(*pair, marks=full_unless(pair not in FULL)) for pair in PAIRS]
)
@pytest.mark.in_turn(4)
def test_every_way_to_use_a_variable_gives_what_it_gives_in_plain_keras(
    backend: str, num_workers: int, plain: dict[str, Any], tmp_path: Path
) -> None:
    assert len(WAYS) >= 70
    if backend not in plain:
        (tmp_path / "plain").mkdir()
        plain[backend] = run_plain(backend, in_worker, str(tmp_path / "plain"), False)
    for actual in run(backend, num_workers, in_worker, str(tmp_path), True):
        assert differences(actual, plain[backend]) == []
