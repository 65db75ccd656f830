"""Sums of workers on one machine in shared memory, inside graphs of TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdist
from kdist.errors import WorkerMismatchError
from tests.helpers.processes import run

SIZE = 700
"""Of a matrix whose product takes longer than a sum."""


def sums_in_a_graph(is_unequal: bool = False) -> list[Any]:
    """Returns the results of collectives that only the program orders, also in a branch and a loop."""
    import tensorflow as tf

    strategy = kdist.MultiWorkerMirroredStrategy()
    index = strategy.runtime.worker_index
    # TensorFlow orders functions of Python by itself, but not branches and loops that read variables.
    ones, also_ones = tf.Variable(tf.ones(7)), tf.Variable(tf.ones(8))

    def delayed(value: Any, worker: Any) -> Any:
        """Returns a value that one of the workers computes late."""

        def late() -> Any:
            matrix = tf.random.normal([SIZE, SIZE])
            for _ in range(6):
                matrix = tf.tanh(matrix @ matrix)
            return value + 0.0 * matrix[0, 0]

        return tf.cond(tf.equal(worker, index), late, lambda: tf.identity(value))

    def step(x: Any) -> list[Any]:
        context = kdist.get_replica_context()

        def total(value: Any) -> Any:
            return context.all_reduce("SUM", value)

        sizes = 3 + (index if is_unequal else 0), 4
        found = [total(delayed(x * tf.ones(sizes[worker]), worker)) for worker in (0, 1)]
        found.append(context.all_gather(delayed(x * tf.ones((1, 2)), 0), axis=0))
        found.append(total(delayed(x * tf.ones(6), 1)))
        found.append(total(tf.constant([2**40, index], tf.int64)))
        found.append(tf.cond(x > 0.0, lambda: total(delayed(x * ones, 0)), lambda: tf.zeros(7)))

        def body(i: Any, repeated: Any) -> Any:
            return i + 1, repeated * 10 + total(delayed(x * also_ones * tf.cast(i + 1, tf.float32), i % 2))

        found += tf.while_loop(lambda i, _: i < 4, body, (0, tf.zeros(8)))[1:]
        found.append(total(delayed(x * tf.ones(9), 0)))
        return found

    @kdist.function
    def train(x: Any) -> Any:
        return strategy.run(step, args=(x,))

    try:
        for number in (1.0, 2.0, 3.0):
            results = train(tf.constant(number * (1 + index)))
    except WorkerMismatchError as error:
        return [str(error)]
    return [np.asarray(strategy.experimental_local_results(result)[0]) for result in results]


@pytest.mark.kills("tensorflow_sums_in_any_order")
def test_collectives_of_a_graph_run_in_the_order_of_the_program() -> None:
    # In the last step, the values of the workers are 3 and 6.
    nine = [np.full(size, 9.0) for size in (3, 4)]
    gathered = np.array([[3.0, 3.0], [6.0, 6.0]])
    expected = [*nine, gathered, np.full(6, 9.0), np.array([2**41, 1])]
    expected += [np.full(7, 9.0), np.full(8, 11106.0), np.full(9, 9.0)]
    for found in run("tensorflow", 2, sums_in_a_graph):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, wanted)


@pytest.mark.kills("tensorflow_errors_of_sums_lost")
def test_workers_that_sum_different_sizes_get_the_error_of_the_sum() -> None:
    for (text,) in run("tensorflow", 2, sums_in_a_graph, True):
        assert "arrays of different shapes or dtypes" in text and "12 bytes of float32 (3,)" in text
