"""XLA's program of a step: its collectives, its reuse of memory, and its export for GPUs and TPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kdist.testing import WorkerPool
from tests.helpers.compare import assert_close
from tests.helpers.processes import run_plain, start_pool
from tests.sharding import jobs

DEVICES = 4
LAYERS = 3  # of BatchNormalization
OFFSET = 1000.0  # a mean that is large relative to the variance
ROWS, BATCH = 24, 8


def strategy(name: str) -> Any:
    import kdist

    if name != "model":
        return jobs.strategy(name)
    devices = [f"cpu:{i}" for i in range(DEVICES)]
    mesh = {"batch": 2, "model": 2}
    return kdist.ModelParallelStrategy({".*dense.*/kernel": (None, "model")}, mesh=mesh, devices=devices)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with start_pool(1, "jax") as pool:
        pool.run(jobs.prepare, DEVICES)
        yield pool


def normalized(optimizer: str = "sgd") -> Any:
    import keras

    keras.utils.set_random_seed(6)
    layers = keras.layers
    model = keras.Sequential([keras.Input((6, 6, 3))])
    for i in range(LAYERS):
        # The first layer sees the offset of the data.
        model.add(layers.BatchNormalization(momentum=0.5))
        model.add(layers.Conv2D(4 + i, 3, padding="same", activation="relu"))
    model.add(layers.Flatten())
    model.add(layers.Dense(2))
    model.compile(optimizer, "mse")
    return model


def images(number: int, offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(3)
    x = draw.randn(number, 6, 6, 3) * 2 + offset
    return x.astype("float32"), draw.randn(number, 2).astype("float32")


class Recorder:
    """Records the programs of `jax.jit` functions with a name, or their exports for other platforms."""

    def __init__(self, name: str, platforms: tuple[str, ...] = ()) -> None:
        self._name, self._platforms = name, platforms
        self.compiled: list[str] = []
        self.exported: list[Any] = []

    def __enter__(self) -> Recorder:
        import jax

        self._jit = original = jax.jit

        def jit(function: Any, *args: Any, **kwargs: Any) -> Any:
            jitted = original(function, *args, **kwargs)
            if getattr(function, "__name__", "") != self._name:
                return jitted

            def call(*args: Any) -> Any:
                if self._platforms:
                    self.exported.append(jax.export.export(jitted, platforms=self._platforms)(*args))
                else:
                    self.compiled.append(jitted.lower(*args).compile().as_text())
                return jitted(*args)

            return call

        jax.jit = jit  # type: ignore[assignment]
        return self

    def __exit__(self, *exc: Any) -> None:
        import jax

        jax.jit = self._jit


def hlo_of_step(name: str) -> list[str]:
    x, y = images(8)
    with strategy(name).scope():
        model = normalized()
    with Recorder("looped") as recorder:
        model.fit(x, y, batch_size=8, verbose=0)
    return recorder.compiled


def collectives(hlo: str) -> list[tuple[str, int]]:
    """Returns the kind and the number of elements of each collective in a program."""
    found = []
    for types, kind in re.findall(
        r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", hlo
    ):
        shapes = re.findall(r"[a-z]+[0-9]*\[([0-9,]*)\]", types)
        found.append((kind, sum(int(np.prod([int(n) for n in s.split(",") if n] or [1])) for s in shapes)))
    return found


@pytest.mark.kills("jax_four_collectives_per_normalization", "jax_state_not_donated")
def test_a_step_of_fit_has_one_sum_of_gradients_and_two_small_collectives_per_normalization(
    pool: WorkerPool,
) -> None:
    ((hlo,),) = pool.run(hlo_of_step, "mirrored")
    found = collectives(hlo)
    assert "input_output_alias" in hlo
    kernels = [n for kind, n in found if kind == "all-reduce" and n > 200]
    assert len(kernels) == 1, found
    small = [(kind, n) for kind, n in found if n <= 200]
    forward = [n for kind, n in small if kind == "all-gather"]
    assert len(forward) == LAYERS, found
    # A collective sums the gradients of mean and variance. The loss shares it or uses a separate collective.
    assert len(small) - len(forward) <= LAYERS + 1, found
    assert {kind for kind, _ in found} == {"all-reduce", "all-gather"}


def normalize(name: str | None, rows: int, offset: float, dtype: str) -> list[np.ndarray]:
    import contextlib

    import keras

    keras.config.set_dtype_policy(dtype)
    try:
        with contextlib.nullcontext() if name is None else strategy(name).scope():
            model = normalized(keras.optimizers.SGD(0.01))
        model.fit(*images(rows, offset), batch_size=BATCH, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.variables]


@pytest.mark.in_turn(3)
@pytest.mark.kills("jax_moments_of_single_parts")
@pytest.mark.parametrize(
    ("name", "rows", "dtype", "tolerance"),
    [
        ("mirrored", ROWS, "float32", 1e-5),
        ("model", ROWS - 2, "float32", 1e-5),
        ("fully", ROWS, "mixed_bfloat16", 2e-2),
    ],
)
def test_a_model_with_normalization_trains_as_on_one_device(
    name: str, rows: int, dtype: str, tolerance: float, pool: WorkerPool
) -> None:
    expected = run_plain("jax", normalize, None, rows, 3.0, dtype)
    (actual,) = pool.run(normalize, name, rows, 3.0, dtype)
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_moments_beside_a_large_mean_are_those_of_all_rows(pool: WorkerPool) -> None:
    (actual,) = pool.run(normalize, "mirrored", ROWS, OFFSET, "float32")
    mean, variance = np.zeros(3), np.ones(3)
    for first in range(0, ROWS, BATCH):
        batch = images(ROWS, OFFSET)[0][first : first + BATCH].astype("float64")
        mean = (mean + batch.mean((0, 1, 2))) / 2
        variance = (variance + batch.var((0, 1, 2))) / 2
    np.testing.assert_allclose(actual[2], mean, rtol=1e-6)
    np.testing.assert_allclose(actual[3], variance, rtol=1e-5)


def export_steps(name: str) -> list[tuple[tuple[str, ...], int]]:
    """Exports the steps of `fit`, `evaluate` and `predict`, and a function that `strategy.run` runs."""
    import keras

    import kdist

    x, y = images(8)
    ours = strategy(name)
    with ours.scope():
        model = normalized("adam")
        model.add(keras.layers.Dropout(0.5))
    variables = model.trainable_variables

    def step(inputs: Any, targets: Any) -> Any:
        def loss_fn() -> Any:
            return keras.ops.mean((model(inputs, training=True) - targets) ** 2)

        loss, gradients = kdist.value_and_grad(loss_fn, variables)()
        model.optimizer.apply(gradients, variables)
        return loss

    platforms = ("cuda", "tpu")
    with Recorder("looped", platforms) as fitted, Recorder("_whole", platforms) as ran:
        model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        batch = next(iter(ours.experimental_distribute_dataset([(x, y)])))
        ours.run(step, args=batch)
    assert len(fitted.exported) == 3 and len(ran.exported) == 1
    return [(e.platforms, e.nr_devices) for e in (*fitted.exported, *ran.exported)]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", ["mirrored", "fully", "model"])
def test_gpus_and_tpus_have_all_that_a_step_does(name: str, pool: WorkerPool) -> None:
    (exported,) = pool.run(export_steps, name)
    assert exported == [(("cuda", "tpu"), DEVICES)] * 4
