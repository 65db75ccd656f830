"""Messages and values that the workers of a runtime exchange, in two and three processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kdist.testing import WorkerPool
from tests.helpers.compare import assert_close
from tests.helpers.processes import start_pool


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (2, 2)], ids=["2", "3", "2x2"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    num_workers, num_devices = request.param
    with start_pool(num_workers, "jax") as pool:
        pool.run(_join, num_devices)
        yield pool


def _strategy(num_devices: int | None = None) -> Any:
    import keras

    import kdist

    if num_devices is not None:
        keras.kdist_test_devices = [
            f"cpu:{i}" for i in range(num_devices)
        ]  # the worker keeps it between calls
    return kdist.MultiWorkerMirroredStrategy(devices=keras.kdist_test_devices)


def _join(num_devices: int) -> None:
    _strategy(num_devices)


def test_messages_come_in_the_order_of_the_workers(pool: WorkerPool) -> None:
    def gather() -> list[list[bytes]]:
        runtime = _strategy().runtime
        me = runtime.worker_index
        return [
            runtime.group.all_gather_bytes(data) for data in (b"", bytes([me]) * (me + 1), b"x" * 100_000)
        ]

    count = pool.num_workers
    for empty, different, large in pool.run(gather):
        assert empty == [b""] * count
        assert different == [bytes([i]) * (i + 1) for i in range(count)]
        assert large == [b"x" * 100_000] * count


def test_variables_become_those_of_the_chief(pool: WorkerPool) -> None:
    def broadcast() -> list[Any]:
        import keras

        runtime = _strategy().runtime
        me = runtime.worker_index
        dtypes = ("float32", "bfloat16", "uint32", "int32", "bool", "float16")
        variables = [keras.Variable(np.full((3, 1), me + 1), dtype=dtype) for dtype in dtypes]
        variables.append(keras.Variable(float("nan") if me == 0 else 1.0))
        runtime.broadcast_variables(variables)
        assert [keras.backend.standardize_dtype(v.value.dtype) for v in variables[:6]] == list(dtypes)
        return [np.asarray(v.value).astype("float32").ravel().tolist() for v in variables]

    for values in pool.run(broadcast):
        assert values[:6] == [[1.0] * 3] * 6
        assert np.isnan(values[6]).all()


def test_variables_of_a_large_model_travel_a_few_at_a_time(pool: WorkerPool) -> None:
    def broadcast() -> tuple[list[int], list[float]]:
        import keras

        from kdist.backends import workers

        runtime = _strategy().runtime
        variables = [keras.Variable(np.full(200, 10 * i + runtime.worker_index)) for i in range(5)]
        original, limit, sent = runtime.broadcast, workers._MOST_BYTES, []

        def counted(values: Any) -> Any:
            sent.append(len(values))
            return original(values)

        workers._MOST_BYTES, runtime.broadcast = 2000, counted
        try:
            runtime.broadcast_variables(variables)
        finally:
            workers._MOST_BYTES = limit
            del runtime.broadcast
        return sent, [float(np.asarray(v.value)[0]) for v in variables]

    for sent, values in pool.run(broadcast):
        assert sent == [2, 2, 1]
        assert values == [0, 10, 20, 30, 40]


def test_every_worker_predicts_all_rows_in_order(pool: WorkerPool) -> None:
    def predict(rows: int) -> Any:
        import keras

        with _strategy().scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        return (
            model.predict(np.arange(rows, dtype="float32")[:, None], batch_size=5, verbose=0).ravel().tolist()
        )

    for rows in (1, 13, 20):
        assert pool.run(predict, rows) == [list(map(float, range(rows)))] * pool.num_workers


def test_numbers_are_those_of_one_device(pool: WorkerPool) -> None:
    def train(distributed: bool) -> Any:
        import contextlib

        import keras

        draw = np.random.RandomState(0)
        x, y = draw.randn(38, 4).astype("float32"), draw.randn(38, 2).astype("float32")
        strategy = _strategy()
        with strategy.scope() if distributed else contextlib.nullcontext():
            keras.utils.set_random_seed(1)
            layers = [
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
            ]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "mse", metrics=["mae"])
        # The workers have different seeds, but all must use the chief's order of rows.
        np.random.seed(7 if not distributed else 7 + strategy.runtime.worker_index)
        history = model.fit(x, y, batch_size=12, epochs=3, verbose=0).history
        return history, model.get_weights()

    (expected, weights), *_ = pool.run(train, False)
    for history, others in pool.run(train, True):
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)
        assert_close(weights, others)


def test_an_error_of_another_kind_is_left_as_it_is(pool: WorkerPool) -> None:
    def explain() -> bool:
        error = ValueError("shapes do not fit")
        return _strategy().runtime.group.explain_failure(error) is error

    assert all(pool.run(explain))
