"""`assert_parity`: a user's own model trains to the numbers of one device, or the test says which one differs."""

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
    """Checks that a model trains under a strategy to the numbers of plain Keras on one device.

    The model is trained twice: in a process of its own without a strategy, and in workers, each of which makes the
    strategy and the model in its scope. The weights before and after training, the history and the predictions of every
    worker must equal those of one device.

    Args:
        make_model: Returns the compiled model. It is called once in each process.
        data: A tuple of `x`, `y` and perhaps `sample_weight`; or a function that returns it or a dataset, the same in
            every process and at every call.
        strategy: Returns the strategy; by default `kdist.MultiWorkerMirroredStrategy`.
        num_workers: How many worker processes there are.
        backend: Their Keras backend; by default what `KERAS_BACKEND` says.
        epochs: How often the model sees the data.
        rtol: Relative tolerance.
        atol: Absolute tolerance, for numbers near zero.
        seed: Of Keras's random numbers, before the model is made.
        timeout: How many seconds each of the two runs may take.
        workers: Whose processes are kept for the next call; by default new ones are started and ended. With pytest,
            the fixture `kdist_workers`.
        **fit_arguments: What else `fit` is told: `batch_size`, `validation_split`, `class_weight`.

    Raises:
        AssertionError: If a number differs; the message names it, and the likely reasons.
        WorkerFailure: If a worker fails; the message has its traceback.
        PoolTimeoutError: If a worker takes longer than `timeout`.
        InvalidArgumentError: If the strategy has one replica alone, or an argument cannot be.

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
