"""The interface of parameter server training, implemented by TensorFlow's coordinator and by kdist."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from kdist.context import StrategyLike
from kdist.control import whereabouts
from kdist.control.waiting import Waiting
from kdist.errors import InvalidArgumentError, OutOfRangeError, StrategyScopeError, WorkerTimeoutError

if TYPE_CHECKING:
    import keras
    import numpy as np

    from kdist.arrays.types import Args, Function, Kwargs, Structure, Tensor


class RemoteValue(ABC):
    """The result of a scheduled function.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/RemoteValue
    """

    @abstractmethod
    def fetch(self) -> Any:
        """Waits for the function, and returns its result as NumPy arrays and Python values.

        Raises:
            BaseException: If the function raised an error.
        """

    @abstractmethod
    def get(self) -> Any:
        """Waits for the function, and returns its result as tensors."""


class PerWorkerValues(ABC):
    """One value per worker. A scheduled function receives the value of the worker that runs it.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/PerWorkerValues
    """

    @abstractmethod
    def __iter__(self) -> PerWorkerValues:
        """Returns a `PerWorkerValues` of iterators, if the values are datasets."""

    @abstractmethod
    def peek(self) -> Any:
        """Returns the first element of one worker's dataset, as NumPy arrays."""

    def __next__(self) -> NoReturn:
        raise StrategyScopeError(
            "The coordinator cannot iterate over a PerWorkerValues: only workers can.",
            hint="Call next(iterator) in the step: coordinator.schedule(step, args=(iterator,))",
        )


# `tf.distribute` has both names.
PerWorkerValue = PerWorkerValues


class _Current(threading.local):
    worker: int | Tensor | None = None


_current = _Current()


@contextlib.contextmanager
def on_worker(index: int | Tensor) -> Iterator[None]:
    """A context manager in which this thread runs or traces functions for the worker `index`."""
    outer, _current.worker = _current.worker, index
    try:
        yield
    finally:
        _current.worker = outer


def experimental_get_current_worker_index() -> Any:
    """Returns the index of the worker that runs this scheduled function or creates its dataset.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/experimental_get_current_worker_index

    Returns:
        An integer. On TensorFlow, a scalar tensor, because the function is traced once for all workers.

    Raises:
        StrategyScopeError: If it is not called in a function that runs on a worker.

    Example:

    ```python
    def dataset_fn(context):
        index = kdist.coordinator.experimental_get_current_worker_index()
        return dataset.shard(num_shards=2, index=index)
    ```
    """
    if _current.worker is None:
        raise StrategyScopeError(
            "There is no current worker: this code does not run on a worker.",
            hint="Call it in a function that you pass to `schedule` or `create_per_worker_dataset`.",
        )
    return _current.worker


class Coordination(ABC):
    """The workers and servers of one job, controlled by its coordinator."""

    num_workers: int
    num_servers: int
    closures: Any
    """The scheduled functions that are not finished; see `kdist/coordinator/closures.py`."""
    end_of_data: type[Exception] = OutOfRangeError
    """The error of a step on a worker whose dataset has ended."""
    places_variables: bool = False
    """Whether the servers hold the variables from their creation in `scope`."""

    def scope(self) -> AbstractContextManager[object]:
        """A context manager for the strategy's scope: the servers hold variables created inside, or `give` follows."""
        return contextlib.nullcontext()

    def give(self, variables: Sequence[keras.Variable]) -> None:
        """Receives new variables at the end of the scope. Does nothing if the servers already hold them."""
        return

    def in_closure(self) -> bool:
        """Returns whether this thread runs or traces a scheduled function under the coordinator's strategy."""
        return False

    def run(self, strategy: StrategyLike, fn: Function, args: Args, kwargs: Kwargs) -> Structure:
        """Runs a function in the worker's replica. Only scheduled functions call this; see `in_closure`."""
        raise NotImplementedError

    @abstractmethod
    def schedule(
        self,
        fn: Function,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        done: Callable[[Structure], None] | None = None,
    ) -> RemoteValue:
        """Schedules one call of a function on any worker. Raises the error of an earlier function.

        Calls `done` with the result of the function.
        """

    @abstractmethod
    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerValues:
        """Creates a dataset on each worker with a function without arguments, or copies a dataset to it."""

    @abstractmethod
    def close(self) -> None:
        """Releases workers and servers, which then wait for another coordinator. Can be called twice."""


def wait_for_tasks(
    names: Sequence[str],
    is_there: Callable[[int], bool],
    pause: Callable[[int, float], object],
    timeout: float,
) -> None:
    """Waits until all workers and servers have joined.

    Args:
        names: The names of the tasks.
        is_there: Returns whether the task with an index has joined.
        pause: Waits for the task with an index, for at most a number of seconds.
        timeout: Seconds to wait.

    Raises:
        WorkerTimeoutError: If tasks do not join in time; the message names them.
    """
    deadline = time.monotonic() + timeout
    waiting = Waiting(names, timeout)
    missing: Sequence[int] = range(len(names))
    while missing := [index for index in missing if not is_there(index)]:
        waiting.note(missing)
        if (left := deadline - time.monotonic()) <= 0:
            raise WorkerTimeoutError(
                f"These workers or servers did not join within {timeout:g} s: "
                f"{', '.join(names[index] for index in missing)}.",
                hint="Start the script for these tasks as well. There, it must call `kdist.Server(...).join()`.",
            )
        pause(missing[0], left)


def number_of_parts(answer: Any, shape: Sequence[int], partitioner: object) -> int:
    """Returns the number of parts along the first axis, given the answer of a partitioner.

    Raises:
        InvalidArgumentError: If the answer is not one positive integer per axis, or splits another axis.
    """
    try:
        numbers = [operator.index(number) for number in answer]
    except TypeError:
        numbers = []
    if not numbers or numbers[0] < 1 or any(number != 1 for number in numbers[1:]):
        raise InvalidArgumentError(
            "The partitioner did not return a valid number of parts per axis.",
            received={"partitioner": partitioner, "shape": tuple(shape), "returned": answer},
            hint="Return one integer per axis: at least 1 for the first axis, and 1 for each other axis.",
        )
    return numbers[0]


_AT_MOST = 2.0  # seconds; not longer, because a thread may wait for a step that takes a minute


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Waits for threads to end, because a thread inside the backend would abort the exiting process."""
    deadline = time.monotonic() + _AT_MOST
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def after_lost_server() -> str:
    """Returns the hint of errors about a lost server, which names the last checkpoint."""
    saved = (
        f"The last checkpoint is {whereabouts.last_saved}."
        if whereabouts.last_saved
        else "No checkpoint was saved."
    )
    return (
        f"Restart the job: the variables on this server are lost. {saved} With kdist.callbacks.BackupAndRestore, `fit` "
        "resumes from the last checkpoint."
    )


class Record(Protocol):
    """The record of a variable on servers: its values of one step; see `kdist/coordinator/served.py`."""

    served: Any

    def variable(self) -> keras.Variable: ...
    def is_here(self) -> bool: ...
    def whole(self) -> Any: ...
    def rows(self, numbers: np.ndarray, /) -> np.ndarray: ...


class Engine(ABC):
    """The functions of a backend that kdist's own parameter servers need; see `kdist/coordinator/`."""

    resets_all = False
    """Whether an update of Keras's optimizers discards accumulated gradients also of variables without a gradient."""

    @abstractmethod
    def load(self, variable: keras.Variable, held: Tensor | None, array: np.ndarray) -> Tensor:
        """Writes an array into a variable's native value (`None` creates a new value), and returns it."""

    @abstractmethod
    def mark(self, held: Tensor) -> object:
        """Returns a mark of a native value, so that `is_changed` can detect changes."""

    @abstractmethod
    def is_changed(self, held: Tensor, mark: object) -> bool:
        """Returns whether a native value may have changed since it was marked."""

    @abstractmethod
    def table(self, record: Record) -> Tensor | None:
        """Returns a substitute for a large variable in a replica. A lookup requests rows from the servers.

        Args:
            record: The variable's record: `whole()` returns the native value, `rows(ids)` returns some rows.

        Returns:
            `None` if programs look rows up before they run; see `Strategy.tables` of workers.
        """

    @abstractmethod
    def by_rows(self, variable: keras.Variable, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the row numbers and rows of a sparse gradient, as tensors; `None` for a dense gradient.

        Ignore rows with a negative number.
        """

    @abstractmethod
    def train_step(self, model: keras.Model, data: Structure) -> Structure:
        """Runs a model's `train_step` in a replica of one worker, and returns its logs."""

    @abstractmethod
    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[np.ndarray], variables: Sequence[keras.Variable]
    ) -> None:
        """Updates some variables of a Keras optimizer."""
