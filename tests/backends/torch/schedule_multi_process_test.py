"""Exchanges in a recorded step overlap with computation, in the same order as in Keras's code."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.helpers.compare import assert_equal
from tests.helpers.processes import run


def train(eager_workers: tuple[int, ...]) -> tuple[list[Any], list[tuple[str, int]]]:
    """Trains with small buckets; returns the results, and the exchange events of the last step."""
    from unittest import mock

    import keras

    import kdist
    from kdist.backends.torch import recorded_steps, schedule, workers

    strategy = kdist.MultiWorkerMirroredStrategy()
    events: list[tuple[str, int]] = []
    original = workers.JoinedWorkers.start_all_reduce

    def start(self: Any, tensor: Any, group: Any = None, result: Any = None) -> Any:
        events.append(("start", tensor.numel()))
        finish = original(self, tensor, group, result)

        def noted() -> None:
            finish()
            events.append(("finish", tensor.numel()))

        return noted

    class Forget(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            events.clear()

    def eagerly(self: Any, model: Any, batch: Any, run: Any) -> Any:
        return run(batch)

    layers = keras.layers
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(16, "relu"),
                layers.BatchNormalization(synchronized=True, momentum=0.7),
                layers.Dense(16),
                layers.Dropout(0.3, seed=3),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "mse", metrics=["mae"])
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(76, 6)).astype("float32"), rng.normal(size=(76, 2)).astype("float32")
    ours = recorded_steps.RecordedSteps.run
    run_step = eagerly if strategy.runtime.worker_index in eager_workers else ours
    with (
        mock.patch.object(schedule, "_BUCKET", 1000),
        mock.patch.object(workers.JoinedWorkers, "start_all_reduce", start),
        mock.patch.object(recorded_steps.RecordedSteps, "run", run_step),
    ):
        history = model.fit(
            x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[Forget()]
        ).history
        last = events[:]
    return [*history.values(), *map(np.array, model.get_weights())], last


@functools.cache
def trained(eager_workers: tuple[int, ...]) -> Any:
    return run("torch", 2, train, eager_workers)


def in_flight(events: list[tuple[str, int]]) -> int:
    """Returns the largest number of simultaneous exchanges."""
    now = np.cumsum([1 if kind == "start" else -1 for kind, _ in events])
    return int(now.max())


@pytest.mark.kills("torch_exchange_not_awaited")
@pytest.mark.parametrize("eager_workers", [(), (0,), (1,)])
def test_workers_that_replay_steps_train_as_workers_that_run_them(eager_workers: tuple[int, ...]) -> None:
    expected = trained((0, 1))[0][0]
    for numbers, _ in trained(eager_workers):
        assert_equal(numbers, expected)


@pytest.mark.kills("torch_exchanges_one_after_the_other", "torch_exchanges_in_another_order")
def test_a_replay_starts_exchanges_early_and_in_the_same_order() -> None:
    (_, eager), (_, replay) = trained((0, 1))[0], trained(())[0]
    starts = [size for kind, size in eager if kind == "start"]
    assert [size for kind, size in replay if kind == "start"] == starts
    assert len(starts) == 5  # two for BatchNormalization, two for gradients, one for metrics
    assert (in_flight(eager), in_flight(replay)) == (2, 3)


def strided_on_one_worker() -> list[float]:
    import torch

    import kdist

    strategy = kdist.MultiWorkerMirroredStrategy()
    index = strategy.runtime.worker_index

    def total(x: Any) -> Any:
        column = x[:, 0]
        return kdist.get_replica_context().all_reduce("SUM", column if index == 0 else column.contiguous())

    totals: list[float] = strategy.run(total, args=(torch.arange(6.0).reshape(3, 2),)).tolist()
    return totals


@pytest.mark.kills("torch_sums_of_strided_tensors_elsewhere")
def test_tensors_may_be_contiguous_on_some_workers_only() -> None:
    assert run("torch", 2, strided_on_one_worker) == [[0.0, 4.0, 8.0]] * 2
