"""Pickles functions for the workers and results for the coordinator, with special handling of Keras objects.

Variables on the servers are pickled as numbers; the strategy and per-worker values are pickled as references.
A task unpickles data only from tasks that proved to have the job's secret. These can run code anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import cloudpickle
import keras
import numpy as np

from kdist import keras_hooks
from kdist.arrays import rows
from kdist.arrays.types import R
from kdist.backends.coordination import on_worker
from kdist.coordinator.rpc import Message
from kdist.errors import InvalidArgumentError, KdistError

_DEEP = 100_000  # calls, because the depth of a pickle grows with the number of layers
_STACK = 512 << 20  # bytes, which the system allocates only when they are used

_arriving = threading.local()
"""Its attribute `task` is the task for which this thread unpickles."""


def variable_here(number: int, spec: object) -> keras.Variable:
    """Unpickles a variable: returns the variable of this task with this number."""
    return _arriving.task.variable(number, spec)


def strategy_here() -> object:
    """Unpickles the strategy: returns the strategy of this task."""
    return _arriving.task.strategy


@dataclasses.dataclass(frozen=True)
class Failed:
    """Takes the place of a per-worker value whose creation failed."""

    error: Exception


def own_value_here(number: int) -> object:
    """Unpickles a per-worker value: returns the value of this worker, or raises the error of its creation."""
    value = _arriving.task.own_values[number]
    if isinstance(value, Failed):
        raise value.error
    return value


class Pickler(cloudpickle.Pickler):
    """Pickles objects for other tasks of the job, which replace `strategy` with their own strategy.

    `reduce` returns the reduced form of special objects, and `NotImplemented` for other objects.
    """

    def __init__(self, file: IO[bytes], strategy: object, reduce: Callable[[object], object]) -> None:
        super().__init__(file, protocol=5)
        self._strategy = strategy
        self._reduce = reduce

    def reducer_override(self, obj: object) -> object:
        if obj is self._strategy:
            return strategy_here, ()
        if isinstance(obj, types.MethodType) and obj.__self__ is self._strategy:
            return getattr, (self._strategy, obj.__name__)  # of the strategy there, which has another class
        if (found := self._reduce(obj)) is not NotImplemented:
            return found
        if isinstance(obj, keras.Variable):
            return reduced_variable(obj)
        if (found := keras_hooks.reduced(obj)) is not NotImplemented:
            return found
        return super().reducer_override(obj)


def reduced_variable(variable: keras.Variable) -> tuple[object, ...]:
    """Returns the reduced form of a Keras variable: its number if it is on the servers, or its value."""
    if (record := keras_hooks.record_of(variable)) is not None:
        return variable_here, (record.home.number, (*keras_hooks.variable_state(variable), record.home))
    cls, state = keras_hooks.variable_state(variable)
    return _local_variable, (cls, state, np.array(rows.to_host(keras_hooks.native_value(variable))))


def _local_variable(cls: type, state: dict[str, object], value: np.ndarray) -> keras.Variable:
    index = getattr(_arriving.task, "index", 0)
    return keras_hooks.new_variable(cls, state, keras_hooks.offset_seed(state, value, index))


_TO_WORKER = (
    "The function or an object that it uses cannot be pickled, so kdist cannot send it to a worker.",
    "Create files, locks and iterators inside the function, and datasets with create_per_worker_dataset.",
)
_TO_COORDINATOR = (
    "The result of the function cannot be pickled, so the worker cannot send it to the coordinator.",
    "Return tensors, arrays and Python values, or `None`.",
)


def dumps(
    value: object,
    strategy: object,
    reduce: Callable[[object], object] = lambda obj: NotImplemented,
    problem_and_hint: tuple[str, str] = _TO_WORKER,
) -> np.ndarray:
    """Pickles a value for another task, as an array of bytes.

    Raises:
        InvalidArgumentError: If a part of the value cannot be pickled.
    """

    def dump() -> bytes:
        file = io.BytesIO()
        Pickler(file, strategy, reduce).dump(value)
        return file.getvalue()

    try:
        return np.frombuffer(_deeply(dump), np.uint8)
    except KdistError:  # already has an explanation
        raise
    except Exception as error:
        problem, hint = problem_and_hint
        received = {"value": value, "error": f"{type(error).__name__}: {error}"}
        raise InvalidArgumentError(problem, received=received, hint=hint) from error


def loads(data: np.ndarray, task: object) -> Any:
    """Unpickles a value from `dumps`.

    It uses the `variable(number, spec)`, the `strategy`, the `own_values` and the `index` of `task`.
    """

    def load() -> object:
        _arriving.task = task
        try:
            with keras_hooks.arriving(getattr(task, "strategy", None)):
                return pickle.loads(data.data)
        finally:
            _arriving.task = None

    return _deeply(load)


def _deeply(function: Callable[[], R]) -> R:
    """Calls a function that reads or writes a pickle, in a thread with a large stack if it is too deep."""
    try:
        return function()
    except (RecursionError, pickle.PicklingError):  # cloudpickle turns a RecursionError into a PicklingError
        pass
    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    sys.setrecursionlimit(max(limit, _DEEP))
    try:
        with ThreadPoolExecutor(1, "kdist pickling") as pool:
            try:
                outcome = pool.submit(function)  # starts the thread
            finally:
                threading.stack_size(size)
            return outcome.result()
    finally:
        sys.setrecursionlimit(limit)


def answers_errors(method: Callable[[Any, Mapping[str, Any], list[np.ndarray]], Message]) -> Any:
    """Decorates a method of a worker. If it raises an error, it answers with this error: see `load_error`."""

    @functools.wraps(method)
    def answer(task: Any, header: Mapping[str, Any], arrays: list[np.ndarray]) -> Message:
        try:
            with on_worker(task.index):
                return method(task, header, arrays)
        except BaseException as error:
            return {"raised": True}, [np.frombuffer(_dump_error(error), np.uint8)]

    return answer


def _dump_error(error: BaseException) -> bytes:
    """Pickles an exception with its traceback, or a `RuntimeError` with its text if that fails."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = cloudpickle.dumps((error, text))
        pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return pickled


def load_error(data: np.ndarray, worker: str) -> BaseException:
    """Returns the exception that a worker has answered, with a note about the worker and the traceback there."""
    error, text = pickle.loads(data.data)
    error.add_note(f"Raised on {worker}:\n{text}")
    return error


def answer_result(result: object, strategy: object) -> Message:
    """Returns the answer with the result of a function, with its tensors and variables as NumPy arrays."""

    def host(leaf: object) -> object:
        return (
            np.array(rows.to_host(leaf))
            if keras.ops.is_tensor(leaf) or isinstance(leaf, keras.Variable)
            else leaf
        )

    value = keras.tree.map_structure(host, result)
    return {}, [dumps(value, strategy, problem_and_hint=_TO_COORDINATOR)]
