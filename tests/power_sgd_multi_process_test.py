"""PowerSGD: the weights against the algorithm in NumPy, the numbers that are sent, and what happens around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdist
from kdist.errors import WorkerMismatchError
from kdist.experimental import CommunicationOptions
from tests.compression_multi_process_test import logged, sent_tensors
from tests.helpers.processes import each_backend, rank, run, start_pool

FEATURES, UNITS, BATCH, BATCHES, RATE = 30, 20, 8, 6, 0.5
RANK = 2
THIN = RANK * FEATURES + UNITS  # numbers in the first exchange of a step, with the bias


def _rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    x = random.normal(size=(BATCH * BATCHES, FEATURES)).astype("float32")
    return x, random.normal(size=(BATCH * BATCHES, UNITS)).astype("float32")


def oracle(batch: int) -> list[np.ndarray]:
    """Returns the weights of two workers after two passes over the rows, computed with means over the workers."""
    x, y = (array.astype("float64") for array in _rows())
    kernel, bias = np.zeros((FEATURES, UNITS)), np.zeros(UNITS)
    errors = [np.zeros_like(kernel) for _ in range(2)]
    factor = np.random.default_rng(0).normal(size=(RANK, UNITS)).astype("float32").astype("float64").T
    for start in [*range(0, len(x), batch)] * 2:
        parts = [(x[i : i + batch // 2], y[i : i + batch // 2]) for i in (start, start + batch // 2)]
        slopes = [2 / (len(a) * UNITS) * (a @ kernel + bias - b) for a, b in parts]
        matrices = [a.T @ s + e for (a, _), s, e in zip(parts, slopes, errors, strict=True)]
        bias = bias - RATE * np.mean([s.sum(0) for s in slopes], 0)
        left = np.mean([matrix @ factor for matrix in matrices], 0)
        for i in range(RANK):  # Gram-Schmidt
            left[:, i] -= left[:, :i] @ (left[:, :i].T @ left[:, i])
            left[:, i] /= np.linalg.norm(left[:, i])
        factor = np.mean([matrix.T @ left for matrix in matrices], 0)
        estimate = left @ factor.T
        errors = [matrix - estimate for matrix in matrices]
        kernel = kernel - RATE * estimate
    return [kernel, bias]


def trained(how: str, compression_rank: int | None, devices: list[str] | None = None) -> Any:
    """Returns the weights after two passes over the rows, and the numbers of elements that were sent at once.

    Args:
        how: "fit", "loops" (several steps in an execution), "accumulation" (of two batches) or "custom".
        compression_rank: The rank, or `None` without compression.
    """
    import keras

    options = None
    if compression_rank is not None:
        options = CommunicationOptions(compression="powersgd", compression_rank=compression_rank)
    strategy = kdist.MultiWorkerMirroredStrategy(devices=devices, communication_options=options)
    with strategy.scope():
        dense = keras.layers.Dense(UNITS, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((FEATURES,)), dense])
        steps = 2 if how == "accumulation" else None
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=steps)
        model.compile(optimizer, "mse", steps_per_execution=2 if how == "loops" else 1)
        optimizer.build(model.trainable_variables)
    x, y = _rows()
    if how == "custom":
        number = strategy.num_replicas_in_sync

        @kdist.function
        def step(x: Any, y: Any) -> None:
            def train(x: Any, y: Any) -> None:
                x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
                loss = lambda: keras.ops.mean(keras.ops.square(model(x) - y)) / number  # noqa: E731
                _, gradients = kdist.value_and_grad(loss, model.trainable_variables)()
                optimizer.apply(gradients, model.trainable_variables)

            strategy.run(train, args=(x, y))

        def part(array: np.ndarray, start: int) -> Any:
            rows = BATCH // number

            def of_replica(context: Any) -> np.ndarray:
                first = start + context.replica_id_in_sync_group * rows
                return array[first : first + rows]

            return strategy.experimental_distribute_values_from_function(of_replica)

        with sent_tensors() as sent:
            for start in [*range(0, len(x), BATCH)] * 2:
                step(part(x, start), part(y, start))
    else:
        with sent_tensors() as sent:
            for _ in range(2):
                model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights(), [size for _, size in sent]


def _assert_close(found: Any, expected: Any) -> None:
    for weights, _ in found:
        for mine, theirs in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.kills(
    power_sgd_forgets_errors="[fit-torch]",
    power_sgd_factors_not_summed="[custom-jax]",
    power_sgd_starts_anew="[fit-tensorflow]",
    power_sgd_not_with_accumulation="[accumulation-torch]",
    jax_power_sgd_forgets_errors="[fit-jax]",
)
@each_backend
@pytest.mark.parametrize("how", ["fit", "loops", "accumulation", "custom"])
def test_weights_match_the_algorithm(backend: str, how: str) -> None:
    found = run(backend, 2, trained, how, RANK)
    _assert_close(found, oracle(2 * BATCH if how == "accumulation" else BATCH))
    for _, sizes in found:
        assert THIN - UNITS <= max(sizes) < THIN + 4, sizes
        assert RANK * UNITS in sizes


@pytest.mark.kills(power_sgd_error_of_workers="[fit-torch]")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("backend", ["torch", "jax"])  # TensorFlow's workers have one CPU device
@pytest.mark.parametrize("how", ["fit", "custom"])
def test_several_devices_per_worker(backend: str, how: str) -> None:
    pool = start_pool(2, backend)
    try:
        found = pool.run(trained, how, RANK, ["cpu:0", "cpu:1"])
    finally:
        pool.close()
    _assert_close(found, oracle(BATCH))


@pytest.mark.kills("power_sgd_not_orthonormal")
@each_backend
def test_a_large_rank_is_exact(backend: str) -> None:
    (plain, sizes), _ = run(backend, 2, trained, "fit", None)
    assert max(sizes) >= FEATURES * UNITS
    # The gradient of 8 rows has rank 8, so that the last columns are arbitrary.
    _assert_close(run(backend, 2, trained, "fit", BATCH + 2), plain)


def overflowed() -> Any:
    """Returns whether a step with an infinite number changes the weights, and the weights after the next step."""
    import keras

    options = CommunicationOptions(compression="powersgd")
    with kdist.MultiWorkerMirroredStrategy(communication_options=options).scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(UNITS)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE)), "mse")
    x, y = _rows()
    bad = np.array(x)
    bad[0, 0] = np.inf
    weights = [model.get_weights()[0]]
    for rows in (bad, x):
        model.fit(rows[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        weights.append(model.get_weights()[0])
    return np.abs(np.diff(weights, axis=0)).max((1, 2)).tolist()


@pytest.mark.kills("power_sgd_keeps_infinite_errors")
@each_backend
def test_training_continues_after_an_overflow(backend: str) -> None:
    for first, second in run(backend, 2, overflowed):
        assert first == 0 and 0 < second < 10


def sharded() -> list[str]:
    import keras

    from kdist.communication import options as communication

    communication._ignored.clear()
    with logged() as lines:
        options = CommunicationOptions(compression="powersgd")
        with kdist.FullyShardedStrategy(communication_options=options).scope():
            model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(UNITS)])
            model.compile("sgd", "mse")
        model.fit(*_rows(), batch_size=BATCH, verbose=0)
    return lines


@pytest.mark.kills("power_sgd_of_sharded_variables")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_warning_for_sharded_variables(backend: str) -> None:
    first, second = run(backend, 2, sharded)
    assert ["compression='powersgd' has no effect" in line for line in first] == [True] and second == []


def mismatched() -> str:
    options = CommunicationOptions(compression="powersgd", compression_rank=1 + rank())
    with pytest.raises(WorkerMismatchError) as info:
        kdist.MultiWorkerMirroredStrategy(communication_options=options)
    return str(info.value)


@pytest.mark.kills("compression_ranks_not_compared")
@each_backend
def test_workers_must_have_equal_ranks(backend: str) -> None:
    for message in run(backend, 2, mismatched):
        assert "they differ in compression_rank" in message
