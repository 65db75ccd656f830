"""Layers that the probe checks: it finds `add_loss` in functions that a layer calls, in whatever form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import run, scope


def in_worker_find() -> dict[str, bool]:
    """Returns for each form of a layer whether kdist probes it."""
    import functools
    import types

    import keras

    from kdist import keras_hooks

    def helper(layer: Any, x: Any) -> None:
        layer.add_loss(keras.ops.sum(x))

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    class Penalty:
        def __call__(self, layer: Any, x: Any) -> None:
            layer.add_loss(keras.ops.sum(x))

    penalty, table = Penalty(), {"first": helper}
    library = types.ModuleType("library")
    exec("def penalize(layer, x): layer.add_loss(x)\ndef other(x): return x", vars(library))
    around = decorated(helper)

    class Base(keras.layers.Layer):
        @staticmethod
        def penalize(layer: Any, x: Any) -> None:
            layer.add_loss(keras.ops.sum(x))

    class Static(Base):
        def call(self, x: Any) -> Any:
            self.penalize(self, x)
            return x

    def layer_that(function: Any) -> type:
        return type("Layer", (keras.layers.Layer,), {"call": function})

    def without(self: Any, x: Any) -> Any:
        return library.other(x)

    forms = {
        "static method": Static,
        "closure": layer_that(lambda self, x: helper(self, x)),
        "callable object": layer_that(lambda self, x: penalty(self, x)),
        "dictionary": layer_that(lambda self, x: table["first"](self, x)),
        "decorated": layer_that(lambda self, x: around(self, x)),
        "partial": layer_that(functools.partialmethod(helper).func),
        "module": layer_that(lambda self, x: library.penalize(self, x)),
        "none": layer_that(without),
    }
    model = keras.Sequential([kind(name=name.replace(" ", "_")) for name, kind in forms.items()])
    probed = {layer.name.replace("_", " ") for layer in keras_hooks.own_layers(model)}
    return {name: name in probed for name in forms}


@pytest.mark.kills("add_loss_in_a_helper_not_found", "add_loss_in_a_static_method_not_found")
@pytest.mark.xdist_group("pool-torch")
def test_layers_that_add_losses_in_other_functions_are_probed() -> None:
    (found,) = run("torch", 1, in_worker_find)
    assert found == {name: name != "none" for name in found}


def in_worker_fit_beside_a_table() -> list[str]:
    """Trains a layer that adds sums over its rows and over a table; returns the warnings for lines here."""
    import warnings

    import keras
    import numpy as np

    import kdist

    class Inner(keras.layers.Layer):
        def call(self, x: Any, table: Any) -> Any:
            self.add_loss(keras.ops.sum(x) + keras.ops.sum(table))
            return x

    class Outer(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.inner = Inner(name="beside")
            self.table = self.add_weight(shape=(8, 1), initializer="ones", trainable=False)

        def call(self, x: Any) -> Any:
            return self.inner(x, self.table * 1.0)

    with kdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((1,)), Outer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(np.ones((8, 1)), np.zeros((8, 1)), batch_size=8, verbose=0)
    return [str(warning.message) for warning in caught if warning.filename == __file__]


@pytest.mark.kills("probe_takes_tables_for_rows", "probe_warns_about_another_line")
@pytest.mark.xdist_group("pool-torch")
def test_a_table_with_a_multiple_of_the_rows_is_not_divided() -> None:
    (said,) = run("torch", 1, in_worker_fit_beside_a_table)
    assert any("`add_loss` of layer `beside` may give different results" in text for text in said), said


def in_worker_draw() -> tuple[list[int], list[int]]:
    """Returns the numbers that a generator draws while kdist probes a loss, and the numbers of its seed."""
    import time

    import keras

    def slow(y: Any, predicted: Any) -> Any:
        time.sleep(0.1)
        return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)

    drawn: list[int] = []

    def batches() -> Any:
        for _ in range(10):
            time.sleep(0.01)
            drawn.append(int(np.random.randint(1000)))
            yield np.full((8, 3), drawn[-1] / 1000, "float32"), np.zeros((8, 1), "float32")

    with scope(True):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", slow)
    np.random.seed(3)
    model.fit(batches(), verbose=0)
    return drawn, np.random.RandomState(3).randint(1000, size=10).tolist()


@pytest.mark.in_turn(3)
@pytest.mark.kills(probe_draws_again="[torch-1]")
@pytest.mark.parametrize(("backend", "num_workers"), [("torch", 1), ("tensorflow", 2)])
def test_data_that_a_thread_reads_draw_no_number_twice(backend: str, num_workers: int) -> None:
    for drawn, expected in run(backend, num_workers, in_worker_draw):
        assert drawn == expected
