"""`merge_call` in a function whose gradients `kdist.value_and_grad` computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdist.testing import WorkerFailure
from tests.helpers.compare import assert_close
from tests.helpers.processes import each_backend, run, strategy


def in_worker_weighted_losses(num_replicas: int, in_replicas: bool = False) -> list[Any]:
    """Weights a loss with a sum over all replicas; returns the losses, the gradients and a counter."""
    import keras
    from keras import ops

    import kdist

    s = strategy(num_replicas)
    with s.scope():
        weights = keras.Variable(np.array([1.0, 3.0], "float32"))
        calls = keras.Variable(0.0, trainable=False, aggregation="sum")

    def merge_fn(strategy: Any, number: Any) -> Any:
        calls.assign_add(10.0)  # once, although each replica has it
        return strategy.reduce("SUM", number, axis=None)

    def loss_of(number: Any) -> Any:
        total = kdist.get_replica_context().merge_call(merge_fn, args=(number,))
        if in_replicas:
            calls.assign_add(1.0)
        return number * total * ops.sum(weights * weights)

    def step(number: Any) -> Any:
        loss, (gradient,) = kdist.value_and_grad(loss_of, [weights])(number)
        return loss, gradient

    numbers = s.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 2)
    )
    loss, gradient = s.run(step, args=(numbers,))
    found = [
        [np.array(ops.convert_to_numpy(part)) for part in s.experimental_local_results(value)]
        for value in (loss, gradient)
    ]
    return [*found, float(calls)]


@pytest.mark.kills(jax_writes_in_merge_calls_counted_per_replica="[jax-2-1]")
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(1, 2), (2, 1)])
@each_backend
def test_a_loss_with_a_merge_call_has_gradients(backend: str, num_workers: int, num_replicas: int) -> None:
    numbers = [float(i + 2) for i in range(num_workers * num_replicas)]
    total = sum(numbers)
    for worker, found in enumerate(run(backend, num_workers, in_worker_weighted_losses, num_replicas)):
        mine = numbers[worker * num_replicas :][:num_replicas]
        losses = [np.float32(number * total * (1.0 + 9.0)) for number in mine]
        gradients = [number * total * np.array([2.0, 6.0]) for number in mine]
        assert_close(found, [losses, gradients, 10.0])


@pytest.mark.kills(jax_writes_in_and_around_merge_calls_mixed="[jax]")
@each_backend
def test_writes_in_replicas_and_in_a_merge_call(backend: str) -> None:
    if backend == "jax":
        with pytest.raises(
            WorkerFailure, match="writes a variable both in the replicas and in a `merge_call`"
        ):
            run(backend, 2, in_worker_weighted_losses, 1, True)
    else:
        for found in run(backend, 2, in_worker_weighted_losses, 1, True):
            assert found[-1] == 10.0 + 2 * 1.0
