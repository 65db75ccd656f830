"""Collectives that workers call outside of `Strategy.run`: `broadcast`, `all_gather_object` and `barrier`."""

from __future__ import annotations

import numbers
from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import call_on_all, check_equal
from kdist.context import StrategyLike, current_strategy, joined_strategy
from kdist.errors import DatasetError, InvalidArgumentError, WorkerTimeoutError, check_positive


def broadcast(value: object, source: int = 0, strategy: StrategyLike | None = None) -> Any:
    """Returns the value of one worker on all workers. All workers must call it.

    Args:
        value: A structure of tensors, arrays, numbers, strings and `None`. Only used on worker `source`.
        source: The index of the worker that provides the value.
        strategy: The strategy to use; by default the current strategy, or the strategy that joined the workers.

    Returns:
        The value of worker `source`. Its tensors and numeric arrays become tensors of the backend. On JAX,
        integers that do not fit into 32 bits stay NumPy arrays.

    Raises:
        InvalidArgumentError: If `source` is not a worker, or its value contains an unsupported object.

    Example:

    >>> import kdist
    >>> kdist.broadcast({"rate": 0.1})
    {'rate': 0.1}
    """
    runtime = runtime_of(strategy)
    workers = 1 if runtime is None else runtime.num_workers
    if not isinstance(source, numbers.Integral) or not 0 <= source < workers:
        raise InvalidArgumentError(
            "`source` is not the index of a worker.",
            received={"source": source, "num_workers": workers},
            hint=f"Pass a number from 0 to {workers - 1}.",
        )
    mine = value if runtime is None or runtime.worker_index == source else None
    return _as_tensors(_exchange(runtime, mine)[source])


def all_gather_object(value: object, strategy: StrategyLike | None = None) -> list[Any]:
    """Returns the objects of all workers. All workers must call it.

    Objects are not pickled. You can pass numbers, strings, `None`, arrays, and lists, tuples and dictionaries
    of them. Arrays arrive as NumPy arrays.

    Args:
        value: The object of this worker.
        strategy: See `broadcast`.

    Returns:
        A list with one object per worker, in the order of the workers.

    Raises:
        InvalidArgumentError: On all workers, if the object of any worker contains another type.

    Example:

    >>> import kdist
    >>> kdist.all_gather_object({"loss": 0.5})
    [{'loss': 0.5}]
    """
    return _exchange(runtime_of(strategy), value)


def barrier(
    name: str = "barrier", timeout: float | None = None, strategy: StrategyLike | None = None
) -> None:
    """Waits until all workers reach this barrier.

    Args:
        name: The name of the barrier. Workers that wait at barriers with different names raise an error.
        timeout: Seconds to wait; `None` for the strategy's `timeout_seconds`. After a timeout, this worker has
            sent its message, so it should exit, or call no other barrier.
        strategy: See `broadcast`.

    Raises:
        WorkerMismatchError: If a worker is at another barrier.
        WorkerTimeoutError: If a worker does not reach the barrier in time.

    Example:

    >>> import kdist
    >>> kdist.barrier("data is there", timeout=60)
    """
    if timeout is not None:
        check_positive("timeout", timeout, "Pass a number of seconds: kdist.barrier(name, timeout=600)")
    runtime = runtime_of(strategy)
    if runtime is None or runtime.num_workers == 1:
        return
    hint = "Run the same script on every worker, and call `barrier` on all workers."
    try:
        with runtime.engine_errors():
            check_equal(runtime, "barrier", {"name": name}, hint, timeout=timeout)
    except WorkerTimeoutError as error:
        raise WorkerTimeoutError(
            f"Some workers did not reach the barrier {name!r}: {error.problem}",
            hint="Read the logs of these workers, or wait longer: kdist.barrier(name, timeout=600)",
        ) from error


def runtime_of(strategy: StrategyLike | None) -> Runtime | None:
    """Returns the runtime of `strategy`, of the current strategy, or of the strategy that joined workers."""
    chosen = strategy or current_strategy()
    if not hasattr(chosen, "runtime"):  # `None`, or the default strategy, which creates no runtime
        chosen = joined_strategy()
    return None if chosen is None else chosen.runtime


def _exchange(runtime: Runtime | None, value: object) -> list[Any]:
    """Gathers a value from every worker. If one worker cannot send its value, all workers raise."""
    from kdist.arrays.row_exchange import decode

    if runtime is None or runtime.num_workers == 1:
        return [decode(_encoded(value))]  # same copies, types and errors as with several workers

    def failed(index: int, text: str) -> Exception:
        return InvalidArgumentError(
            f"Worker {index} cannot send its value.",
            received={"failed_worker": index},
            hint=f"Read the traceback of worker {index}.",
        )

    with runtime.engine_errors():
        message, _ = call_on_all(runtime, lambda: _encoded(value), failed, subject="an exchange of values")
        return [decode(data) for data in runtime.group.all_gather_bytes(message)]


def _encoded(value: object) -> bytes:
    import keras

    from kdist.arrays import rows
    from kdist.arrays.row_exchange import encode

    def host(leaf: object) -> object:
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        if not hasattr(leaf, "shape"):
            raise TypeError(f"The type is {type(leaf).__name__!r}.")
        return rows.to_host(leaf)

    try:
        return encode(keras.tree.map_structure(host, value))
    except (DatasetError, TypeError) as error:
        raise InvalidArgumentError(
            "Cannot send the value to other workers: it contains an object of an unsupported type.",
            received={"error": str(error).split("\n")[0].partition(". ")[0][:200]},
            hint="Use numbers, strings, None and arrays, or lists, tuples and dictionaries of them.",
        ) from error


def _as_tensors(value: object) -> object:
    import keras

    def convert(leaf: Any) -> object:
        numeric = hasattr(leaf, "dtype") and leaf.dtype.kind in "biufcV"
        if not numeric:
            return leaf
        array = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
        tensor = keras.ops.convert_to_tensor(array)
        # JAX has no 64-bit integers by default, and drops the upper bits of large numbers.
        has_integers = array.dtype.kind in "iu"
        return array if has_integers and (keras.ops.convert_to_numpy(tensor) != array).any() else tensor

    return keras.tree.map_structure(convert, value)
