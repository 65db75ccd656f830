"""The errors that kdist raises: each states a rule, what was received, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping


class KdistError(Exception):
    """Base class of every error that kdist raises on purpose.

    The message has three parts, in this order: the rule that was broken, what was received instead,
    and a hint that can be pasted.

    Args:
        rule: One or two sentences that state what must hold.
        received: Names and values that broke the rule; shown as `Received: name=value`.
        hint: What to do about it, ready to be pasted where that is possible.

    Example:

    >>> from kdist.errors import KdistError
    >>> str(KdistError("A batch has rows.", received={"rows": 0}, hint="Pass at least one row."))
    'A batch has rows. Received: rows=0. Pass at least one row.'
    """

    def __init__(self, rule: str, *, received: Mapping[str, object] | None = None, hint: str = "") -> None:
        self.rule = rule
        self.received = dict(received or {})
        self.hint = hint
        parts = [rule.rstrip()]
        if self.received:
            listed = ", ".join(f"{name}={value!r}" for name, value in self.received.items())
            parts.append(f"Received: {listed}.")
        if hint:
            parts.append(hint)
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between worker processes; the default would call __init__ with the whole message.
        return _rebuild, (type(self), self.rule, self.received, self.hint)


def _rebuild(cls: type[KdistError], rule: str, received: dict[str, object], hint: str) -> KdistError:
    return cls(rule, received=received, hint=hint)


class InvalidArgumentError(KdistError, ValueError):
    """An argument has a value that cannot work."""


class ClusterConfigError(KdistError, ValueError):
    """The description of the cluster (`TF_CONFIG`, a resolver, a launcher's variables) is wrong."""


class BackendError(KdistError, ImportError):
    """The Keras backend is unknown or not installed."""


class UnsupportedError(KdistError, NotImplementedError):
    """A strategy cannot do this on this backend; the message says what can."""


class DeviceError(KdistError, ValueError):
    """The devices that were asked for are not there, or it is too late to make them."""


class StrategyScopeError(KdistError, RuntimeError):
    """A strategy, or something created under one, is used in the wrong context."""


class WorkerMismatchError(KdistError, RuntimeError):
    """Workers that must agree (on the model, the data, the number of steps) do not."""


class DatasetError(KdistError, ValueError):
    """A dataset gives something that cannot be distributed, or failed while it was read."""


class OutOfRangeError(KdistError, IndexError):
    """There is no next element."""


class WorkerTimeoutError(KdistError, TimeoutError):
    """A worker did not come, or did not answer, in time."""


class WorkerLostError(KdistError, RuntimeError):
    """A worker that takes part in the job has died or cannot be reached any more."""


class WorkerFailedError(KdistError, RuntimeError):
    """Another worker raised an error in a place that all must pass together."""


class LaunchError(KdistError, RuntimeError):
    """A worker process that kdist started has failed."""


class CheckpointError(KdistError, RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointNotFoundError(CheckpointError):
    """There is no complete checkpoint at the path."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is damaged: bytes are missing or are not those that were saved."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint holds something else than the objects that are to be restored."""


_OF_DATA = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@contextlib.contextmanager
def malformed_as(make: Callable[[str], KdistError], *also: type[Exception]) -> Iterator[None]:
    """Turns what Python raises for data of an unexpected form into an error of kdist.

    Args:
        make: Returns the error; called with the words of Python's own.
        also: Further classes of errors that malformed data may cause.

    Example:

    >>> from kdist.errors import DatasetError, malformed_as
    >>> with malformed_as(lambda error: DatasetError(f"A row must have a label, not {error}.")):
    ...     {}["label"]
    Traceback (most recent call last):
        ...
    kdist.errors.DatasetError: A row must have a label, not KeyError: 'label'.
    """
    kinds: tuple[type[Exception], ...] = (*_OF_DATA, *also)
    try:
        yield
    except KdistError:
        raise
    except kinds as error:
        raise make(f"{type(error).__name__}: {error}") from error
