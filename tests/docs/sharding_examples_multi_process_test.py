"""Runs the examples of the page on sharded variables."""

from __future__ import annotations

from pathlib import Path

from tests.docs.examples import Run, each_example, run_example, runs
from tests.docs.things import rows


@runs(on="jax")
def sharding_0(example: Run) -> None:
    def make_a_large_model():
        import keras

        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(1)])

    import kdist

    model = example(kdist=kdist, make_a_large_model=make_a_large_model, **rows())["model"]
    assert not model.layers[0].kernel.value.is_fully_replicated


@runs(on="jax", replaced=('"batch": 2, "model": 4', '"batch": 1, "model": 2'))
def sharding_1(example: Run) -> None:
    import kdist

    assert example(kdist=kdist)["strategy"].num_replicas_in_sync == 2


@runs(on="jax", replaced=("(2, 4)", "(1, 2)"))
def sharding_2(example: Run) -> None:
    import keras

    import kdist

    strategy = example(keras=keras, kdist=kdist)["strategy"]
    assert tuple(strategy.keras_distribution.device_mesh.shape) == (1, 2)


@each_example(globals())
def test_example(backend: str, name: str, tmp_path: Path) -> None:
    run_example(globals(), backend, name, tmp_path)
