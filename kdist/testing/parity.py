"""`assert_parity`: checks that a user's model trains to the same results as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kdist.parity import ATOL, RTOL, check_options, explain, train
from kdist.testing.workers import Workers


def assert_parity(
    make_model: Callable[[], Any],
    data: Any,
    strategy: Callable[[], Any] | None = None,
    *,
    num_workers: int = 2,
    backend: str | None = None,
    epochs: int = 2,
    rtol: float = RTOL,
    atol: float = ATOL,
    seed: int = 0,
    timeout: float = 120.0,
    workers: Workers | None = None,
    **fit_arguments: Any,
) -> None:
    """Checks that a model trains to the same results under a strategy as in plain Keras on one device.

    The model is trained twice: without a strategy in a separate process, and in workers. Each worker creates
    the strategy, and the model in its scope. The weights before and after training, the history and the
    predictions of every worker must equal the results of one device.

    Args:
        make_model: Returns the compiled model. It is called once in each process.
        data: A tuple of `x`, `y` and optionally `sample_weight`, or a function that returns such a tuple or a
            dataset. The function must return the same data in every process and on every call.
        strategy: Returns the strategy; by default `kdist.MultiWorkerMirroredStrategy`.
        num_workers: The number of worker processes.
        backend: The Keras backend of the processes; by default the backend in `KERAS_BACKEND`.
        epochs: The number of epochs.
        rtol: Relative tolerance.
        atol: Absolute tolerance, for values near zero.
        seed: The seed of Keras's random numbers, set before the model is created.
        timeout: Seconds that each of the two runs may take.
        workers: Keeps the processes for the next call, for example the pytest fixture `kdist_workers`. By
            default, each call starts and terminates its processes.
        **fit_arguments: Other arguments of `fit`, such as `batch_size`, `validation_split` or `class_weight`.

    Raises:
        AssertionError: If a result differs; the message contains the differences and likely reasons.
        WorkerFailure: If a worker fails; the message contains its traceback.
        PoolTimeoutError: If a worker takes longer than `timeout`.
        InvalidArgumentError: If the strategy has only one replica, or an argument is invalid.

    Example:

    ```python
    from kdist.testing import assert_parity

    def make_model():
        import keras
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    assert_parity(make_model, (x, y), batch_size=32)
    ```
    """
    check_options(epochs, rtol, atol, strategy)
    told = (epochs, seed, fit_arguments)
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Workers()) if workers is None else workers
        (expected,) = kept(1, backend, plain=True).run(train, make_model, data, None, *told, timeout=timeout)
        under = strategy or _workers_strategy
        found = kept(num_workers, backend).run(train, make_model, data, under, *told, timeout=timeout)
    message = explain(expected, found, rtol, atol)
    if message is not None:
        raise AssertionError(message)


def _workers_strategy() -> Any:
    import kdist

    return kdist.MultiWorkerMirroredStrategy()
