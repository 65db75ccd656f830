"""What workers exchange outside of `Strategy.run`: values, objects, and that all are there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from kdist.backends.contract import Runtime
from kdist.backends.messages import call_on_all, check_equal
from kdist.context import StrategyLike, current_strategy, joined_strategy
from kdist.errors import DatasetError, InvalidArgumentError, WorkerTimeoutError


def broadcast(value: Any, source: int = 0, strategy: StrategyLike | None = None) -> Any:
    """Gives every worker the value that one worker has. All workers must call it.

    Args:
        value: A structure of tensors, arrays, numbers, strings and `None`; counts on worker `source` alone.
        source: The worker whose value it is.
        strategy: Whose workers take part; by default the one in scope, else the one that joined workers.

    Returns:
        The value of worker `source`, with tensors of the backend in place of tensors and arrays.

    Raises:
        InvalidArgumentError: There is no such worker, or it has something else in its value.

    Example:

    >>> import kdist
    >>> kdist.broadcast({"rate": 0.1})
    {'rate': 0.1}
    """
    runtime = runtime_of(strategy)
    workers = 1 if runtime is None else runtime.num_workers
    if not isinstance(source, int) or not 0 <= source < workers:
        raise InvalidArgumentError(
            "`source` is not the index of a worker.",
            received={"source": source, "num_workers": workers},
            hint=f"Pass a number from 0 to {workers - 1}.",
        )
    if runtime is None or workers == 1:
        return value
    mine = value if runtime.worker_index == source else None
    return _as_tensors(_exchange(runtime, mine)[source])


def all_gather_object(value: Any, strategy: StrategyLike | None = None) -> list[Any]:
    """Returns the objects of all workers, in their order. All workers must call it.

    Nothing is pickled: what may travel are numbers, strings, `None`, arrays (as NumPy arrays), and lists,
    tuples and dictionaries of these.

    Args:
        value: This worker's object.
        strategy: As in `broadcast`.

    Returns:
        One object a worker.

    Raises:
        InvalidArgumentError: Some worker has something else; on all workers.

    Example:

    >>> import kdist
    >>> kdist.all_gather_object({"loss": 0.5})
    [{'loss': 0.5}]
    """
    runtime = runtime_of(strategy)
    if runtime is None or runtime.num_workers == 1:
        return [value]
    return _exchange(runtime, value)


def barrier(
    name: str = "barrier", timeout: float | None = None, strategy: StrategyLike | None = None
) -> None:
    """Waits until all workers have come here.

    Args:
        name: Which barrier it is; workers at barriers of different names are told so.
        timeout: Seconds to wait; `None` for as long as all workers are alive. After a timeout this process can
            take part in nothing else, and should end.
        strategy: As in `broadcast`.

    Raises:
        WorkerMismatchError: A worker has come to another barrier.
        WorkerTimeoutError: A worker did not come in time.

    Example:

    >>> import kdist
    >>> kdist.barrier("data is there", timeout=60)
    """
    runtime = runtime_of(strategy)
    if runtime is None or runtime.num_workers == 1:
        return
    hint = "Run the same script on every worker, without branches on the worker around a barrier."
    with runtime.engine_errors():
        _within(timeout, name, lambda: check_equal(runtime, "barrier", {"name": name}, hint))


def _within(timeout: float | None, name: str, function: Callable[[], Any]) -> None:
    if timeout is None:
        function()
        return
    # No engine can be told how long to wait for this one message.
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            function()
            done.put(None)
        except BaseException as error:
            done.put(error)

    threading.Thread(target=wait, name="kdist barrier", daemon=True).start()
    try:
        error = done.get(timeout=timeout)
    except queue.Empty:
        raise WorkerTimeoutError(
            f"Some workers did not reach the barrier {name!r} within {timeout:g} s.",
            hint="Read the logs of the other workers, or wait longer: kdist.barrier(name, timeout=600)",
        ) from None
    if error is not None:
        raise error


def runtime_of(strategy: StrategyLike | None) -> Runtime | None:
    """Returns the runtime of a strategy; of `None`, that of the one in scope, else of the one that joined workers."""
    chosen = strategy or current_strategy()
    if not hasattr(chosen, "runtime"):  # the default strategy, which is no one's choice
        chosen = joined_strategy()
    return None if chosen is None else chosen.runtime


def _exchange(runtime: Runtime, value: Any) -> list[Any]:
    """Gathers a value from every worker; where one cannot be sent, all raise."""
    from kdist.arrays.gathering import decode

    def failed(index: int, text: str) -> Exception:
        hint = f"Read the traceback of worker {index}."
        return InvalidArgumentError(f"Worker {index} cannot send its value.", hint=hint)

    with runtime.engine_errors():
        message, _ = call_on_all(runtime, lambda: _encoded(value), failed)
        return [decode(data) for data in runtime.group.all_gather_bytes(message)]


_SUPPORTED = "Use numbers, strings, None and arrays, or lists, tuples and dictionaries of them."


def _encoded(value: Any) -> bytes:
    import keras

    from kdist.arrays import rows
    from kdist.arrays.gathering import encode

    def host(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        if not hasattr(leaf, "shape"):
            raise InvalidArgumentError(
                "Cannot send the value to other workers: it contains an object of an unsupported type.",
                received={"type": type(leaf).__name__},
                hint=_SUPPORTED,
            )
        return rows.to_host(leaf)

    try:
        return encode(keras.tree.map_structure(host, value))
    except (DatasetError, TypeError) as error:
        raise InvalidArgumentError(
            "Cannot send the value to other workers: it contains an object of an unsupported type.",
            received={"error": str(error).split("\n")[0][:200]},
            hint=_SUPPORTED,
        ) from error


def _as_tensors(value: Any) -> Any:
    import keras

    def convert(leaf: Any) -> Any:
        numeric = hasattr(leaf, "dtype") and leaf.dtype.kind in "biufcV"
        return keras.ops.convert_to_tensor(leaf) if numeric else leaf

    return keras.tree.map_structure(convert, value)
