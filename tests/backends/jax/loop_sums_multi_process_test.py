"""Sums of custom loops on JAX: in shared memory where a program allows it, otherwise by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kdist
from tests.helpers.processes import run


def sums_of(make: Callable[[Any], Callable[..., Any]]) -> tuple[list[np.ndarray], int]:
    """Returns the results of the third call of a function in replicas, and the number of sums in shared memory.

    The argument of replica i of 2 is i + 1 in the first call, twice as much in the second call, and so on.
    """
    import jax

    strategy = kdist.MultiWorkerMirroredStrategy()
    replica_step, memory = make(strategy), strategy.runtime.memory
    start = memory._num_started
    for call in (1, 2, 3):
        values = strategy.experimental_distribute_values_from_function(
            lambda context, call=call: np.float32(call * (context.replica_id_in_sync_group + 1))
        )
        results = strategy.run(replica_step, args=(values,))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)], memory._num_started - start


def loop_of_gradients(strategy: Any) -> Callable[..., Any]:
    """A training step, and sums that the program does not order by their values."""
    import keras

    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weight])

    def replica_step(x: Any) -> Any:
        _, (gradient,) = kdist.value_and_grad(lambda: keras.ops.sum(weight * x), [weight])()
        optimizer.apply([gradient], [weight])
        context = kdist.get_replica_context()

        def delayed(value: Any, replica: int) -> Any:
            """Returns a value that one of the replicas computes late."""

            def late() -> Any:
                matrix = keras.ops.ones((400, 400)) * x
                for _ in range(8):
                    matrix = keras.ops.tanh(matrix @ matrix)
                return value + 0.0 * matrix[0, 0]

            return keras.ops.cond(context.replica_id_in_sync_group == replica, late, lambda: value)

        first, second = (context.all_reduce("SUM", delayed(x * (i + 1), i)) for i in (0, 1))
        return first, second, weight + 0.0

    return replica_step


@pytest.mark.kills("jax_loops_sum_in_sockets")
def test_a_training_step_sums_in_shared_memory() -> None:
    # The sums of the gradients are 3, 6 and 9.
    for (first, second, weight), number in run("jax", 2, sums_of, loop_of_gradients):
        assert (first, second) == (9.0, 18.0) and number > 0
        np.testing.assert_array_equal(weight, np.full(3, 1 - 0.5 * 18, "float32"))


def sums_in_inner_traces(strategy: Any) -> Callable[..., Any]:
    """Collectives in a loop, a branch and a differentiated function; none of them can be in memory."""
    import jax

    def replica_step(x: Any) -> Any:
        context = kdist.get_replica_context()

        def total(value: Any) -> Any:
            return context.all_reduce("SUM", value)

        plain = total(x)
        _, looped = jax.lax.scan(lambda carry, i: (carry, total(x * i)), 0, np.arange(3, dtype="float32"))
        branch = jax.lax.cond(plain > 0, lambda: total(2 * x), lambda: 0 * x)
        gradient = jax.grad(lambda value: total(value * value))(x)
        return plain, looped, branch, gradient

    return replica_step


@pytest.mark.kills("jax_loops_forget_inner_traces")
def test_xla_sums_in_loops_branches_and_gradients() -> None:
    for index, (found, number) in enumerate(run("jax", 2, sums_of, sums_in_inner_traces)):
        assert number == 0
        mine = 3.0 * (index + 1)
        # Each replica adds the gradients of both: 2 * x * 2, because both totals contain its value.
        expected: list[Any] = [9.0, [0.0, 9.0, 18.0], 18.0, 2 * mine * 2]
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, np.asarray(wanted, "float32"))


def another_branch(strategy: Any) -> Callable[..., Any]:
    """A function whose second trace contains a collective that shared memory cannot compute."""
    calls: list[None] = []

    def replica_step(x: Any) -> Any:
        context = kdist.get_replica_context()
        calls.append(None)
        total = context.all_reduce("SUM", x)
        return total, context.all_gather(x[None], axis=0) if len(calls) > 1 else x[None]

    return replica_step


@pytest.mark.kills("jax_loops_stop_at_other_branches", "jax_loops_gather_beside_memory")
def test_a_function_can_take_another_branch_in_its_second_trace() -> None:
    for (total, gathered), number in run("jax", 2, sums_of, another_branch):
        assert (total, number) == (9.0, 0)
        np.testing.assert_array_equal(gathered, [3.0, 6.0])


def sizes_that_differ() -> list[Any]:
    """Returns the error of a sum with other shapes on the other worker, and the results of later sums."""
    strategy = kdist.MultiWorkerMirroredStrategy()
    index = strategy.runtime.worker_index

    def total(x: Any, size: int) -> Any:
        # Shapes of arguments would be compared before the program runs.
        return kdist.get_replica_context().all_reduce("SUM", x * np.ones(size, "float32"))

    found: list[Any] = []
    for size in (3 + index, 2, 4):
        try:
            found.append(np.asarray(strategy.run(total, args=(np.float32(1), size))))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_sums_go_on_after_an_error() -> None:
    for text, *later in run("jax", 2, sizes_that_differ):
        assert "shapes or dtypes" in text and "12 bytes of float32" in text
        for size, value in zip((2, 4), later, strict=True):
            np.testing.assert_array_equal(value, np.full(size, 2.0))


def arguments_that_differ() -> list[list[float]]:
    """Returns the rows of both workers in several calls, with a sum in memory before each one."""
    strategy = kdist.MultiWorkerMirroredStrategy()
    index = strategy.runtime.worker_index

    def total(x: Any) -> Any:
        return kdist.get_replica_context().all_reduce("SUM", x)

    def gathered(rows: Any) -> Any:
        return kdist.get_replica_context().all_gather(rows, axis=0)

    found = []
    for rows in [(2, 2), (2, 1), (1, 2), (2, 2)]:
        assert strategy.run(total, args=(np.float32([1, 2]),)).tolist() == [2, 4]
        found.append(strategy.run(gathered, args=(np.full(rows[index], index, "float32"),)).tolist())
    return found


@pytest.mark.kills("jax_arguments_not_compared", "jax_programs_of_different_shapes")
def test_workers_with_different_shapes_run_one_after_another() -> None:
    for found in run("jax", 2, arguments_that_differ):
        assert found == [[0, 0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1, 1]]


def fit_after_a_failed_sum() -> list[Any]:
    """Returns the error of a `fit` whose sum fails, and the weights of another `fit` after it."""
    from unittest import mock

    import keras

    from kdist.communication.shared_memory import SharedMemory

    with kdist.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.25), "mse")
    x, y = np.arange(1.0, 5.0, dtype="float32")[:, None], np.zeros((4, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    before = [np.array(weight) for weight in model.get_weights()]
    with mock.patch.object(SharedMemory, "sum_all", side_effect=ValueError("a failed sum")):
        try:
            model.fit(x, y, batch_size=4, verbose=0)
            error = ""
        except Exception as found:
            error = str(found)
    model.set_weights(before)
    model.fit(x, y, batch_size=4, verbose=0)
    return [error, before, model.get_weights()]


@pytest.mark.kills("jax_failed_turn_used_again")
def test_fit_sums_again_after_a_failed_step() -> None:
    x = np.arange(1.0, 5.0)
    for error, *steps in run("jax", 2, fit_after_a_failed_sum):
        assert "a failed sum" in error
        kernel, bias = 1.0, 0.0
        for weights in steps:
            gradients = [2 * np.mean((kernel * x + bias) * by) for by in (x, np.ones(4))]
            kernel, bias = kernel - 0.25 * gradients[0], bias - 0.25 * gradients[1]
            np.testing.assert_allclose([float(w.item()) for w in weights], [kernel, bias], rtol=1e-5)
