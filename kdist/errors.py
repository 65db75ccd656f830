"""The errors that kdist raises. Each message contains the problem, the received values and a hint."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

_OWN = os.path.join(os.path.dirname(__file__), "")  # ends with a slash: kdist_examples/ is not kdist/
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", "/lib/python", _OWN)


class KdistError(Exception):
    """Base class of every error that kdist raises on purpose.

    The message has up to three lines: the problem, the received values, and a hint.

    Args:
        problem: One or two sentences: what happened, to what, and why.
        received: Names and values that caused the problem; shown as `Received: name=value`.
        hint: The fix; if possible a line that the user can paste.

    Example:

    >>> from kdist.errors import KdistError
    >>> print(KdistError("The batch is empty.", received={"rows": 0}, hint="Pass at least one row."))
    The batch is empty.
    Received: rows=0
    Pass at least one row.
    """

    def __init__(self, problem: str, *, received: Mapping[str, object] | None = None, hint: str = "") -> None:
        self.problem = problem
        self.received = dict(received or {})
        self.hint = hint
        lines = [problem.rstrip()]
        if self.received:
            lines.append(
                "Received: " + ", ".join(f"{name}={value!r}" for name, value in self.received.items())
            )
        if hint:
            lines.append(hint)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes. By default, unpickling calls __init__ with the whole message.
        return _rebuild, (type(self), self.problem, self.received, self.hint)


def _rebuild(cls: type[KdistError], problem: str, received: dict[str, object], hint: str) -> KdistError:
    return cls(problem, received=received, hint=hint)


class InvalidArgumentError(KdistError, ValueError):
    """An argument has an invalid value."""


class ClusterConfigError(KdistError, ValueError):
    """The cluster description (`TF_CONFIG`, a resolver, a launcher's variables) is invalid."""


class BackendError(KdistError, ImportError):
    """The Keras backend is unknown or not installed."""


class UnsupportedError(KdistError, NotImplementedError):
    """The strategy does not support this operation on this backend; the message suggests an alternative."""


class DeviceError(KdistError, ValueError):
    """The requested devices do not exist, or can no longer be created because the backend has started."""


class StrategyScopeError(KdistError, RuntimeError):
    """A strategy, or an object created in its scope, is used in the wrong context."""


class WorkerMismatchError(KdistError, RuntimeError):
    """Workers disagree on the model, the data or the number of steps."""


class DatasetError(KdistError, ValueError):
    """A dataset yields elements that cannot be distributed, or failed while kdist read it."""


class OutOfRangeError(KdistError, IndexError):
    """The iterator has no more elements."""


class WorkerTimeoutError(KdistError, TimeoutError):
    """A worker did not join or respond in time."""


class WorkerLostError(KdistError, RuntimeError):
    """A worker of the job died or is unreachable."""


class WorkerFailedError(KdistError, RuntimeError):
    """Another worker raised an error where all workers synchronize."""

    others_answer = True
    """Whether the other workers are in the same method, so that this worker can send them a message."""


class LaunchError(KdistError, RuntimeError):
    """A worker process that kdist started failed."""


class CheckpointError(KdistError, RuntimeError):
    """kdist could not write or read a checkpoint."""


class CheckpointNotFoundError(CheckpointError):
    """The path does not contain a complete checkpoint."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is corrupt: bytes are missing or differ from the saved bytes."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint does not match the objects to restore."""


# NumPy raises a SyntaxError for a dtype such as ",f4".
_OF_DATA = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, SyntaxError)


def check_equal_arrays(forms: Sequence[str]) -> None:
    """Raises an error if workers sum or gather different arrays, given the dtype and shape on each worker."""
    if len({*forms}) > 1:
        raise WorkerMismatchError(
            "The workers sum or gather arrays of different shapes or dtypes.",
            received={f"worker {i}": form for i, form in enumerate(forms)},
            hint="Pass the same shape and dtype on all workers, in the same order. If only the number of rows "
            "differs, pass axis=0 to `strategy.reduce` or `strategy.gather`.",
        )


def check_whole(name: str, value: Any, hint: str, least: int = 1) -> int:
    """Returns a whole number of at least `least`, for example of NumPy, as an `int`. Raises an error for others."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or type(value).__name__.startswith("bool"):  # also NumPy's `bool`
        what = f"`{name}` is not a whole number of at least {least}."
        raise InvalidArgumentError(what, received={name: value}, hint=hint)
    return number


def check_function(name: str, value: object, hint: str) -> None:
    """Raises an error unless the value can be called."""
    if not callable(value):
        raise InvalidArgumentError(f"`{name}` is not a function.", received={name: value}, hint=hint)


def check_call(fn: object, args: object, kwargs: object, example: str) -> None:
    """Raises an error unless these are a function and its arguments. `example` lacks its last parenthesis."""
    check_function("fn", fn, f"Pass a function: {example})")
    if not isinstance(args, (tuple, list)):
        raise InvalidArgumentError(
            "`args` is not a tuple of arguments.",
            received={"args": type(args).__name__},
            hint=f"Pass a tuple, with a comma after a single argument: {example})",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgumentError(
            "`kwargs` is not a dictionary of keyword arguments.",
            received={"kwargs": type(kwargs).__name__},
            hint=f'Pass a dictionary: {example}, kwargs={{"training": True}})',
        )


def check_positive(name: str, value: object, hint: str) -> None:
    """Raises an error unless the value is a number above 0, so also for NaN."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or not float(value) > 0:
        raise InvalidArgumentError(f"`{name}` is not a positive number.", received={name: value}, hint=hint)


def is_library(path: str) -> bool:
    """Returns whether a file of Python code belongs to kdist, another library or Python, not to the user."""
    return any(part in path for part in _LIBRARIES)


@contextlib.contextmanager
def malformed_as(make: Callable[[str], KdistError], *also: type[Exception]) -> Iterator[None]:
    """Converts errors that Python raises for malformed data into an error of kdist.

    Args:
        make: A function that returns the error. It gets the type and the message of Python's error.
        also: Additional classes of errors that malformed data may cause.

    Example:

    >>> from kdist.errors import DatasetError, malformed_as
    >>> with malformed_as(lambda error: DatasetError(f"A row has no label ({error}).")):
    ...     {}["label"]
    Traceback (most recent call last):
        ...
    kdist.errors.DatasetError: A row has no label (KeyError: 'label').
    """
    kinds: tuple[type[Exception], ...] = (*_OF_DATA, *also)
    try:
        yield
    except KdistError:
        raise
    except kinds as error:
        raise make(f"{type(error).__name__}: {error}") from error
