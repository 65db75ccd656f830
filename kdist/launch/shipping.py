"""The calls of `kdist.launch` and their outcomes. Pickles functions for workers, and their results and exceptions.

On one machine, the pickles go through private files and pipes between processes of one user. Between
machines, they go only through Ray, which pickles all its messages itself.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import importlib.util
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster.roles import task_name
from kdist.errors import InvalidArgumentError, LaunchError

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MOST_LINES = 40  # of the stacks in a message


def cloudpickle() -> Any:
    """Imports and returns the package `cloudpickle`, which only this module needs."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise InvalidArgumentError(
            "The package cloudpickle, which sends functions to workers, is not installed.",
            hint="Install it: pip install cloudpickle",
        ) from error


def worker_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs the `main` function of a kdist module in a new Python process.

    The process finds this copy of kdist even if it is not installed.
    """
    # `-m` would find an uninstalled kdist only in the working directory.
    code = f"import sys; sys.path.insert(1, {_ROOT!r}); from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def pack_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], path: Sequence[str] | None
) -> bytes:
    """Pickles a call for `perform` in another process. `path` is its `sys.path`; `None` to keep its own path.

    Raises:
        InvalidArgumentError: If the function or an argument cannot be pickled.
    """
    pickler = cloudpickle()
    module = sys.modules.get(getattr(fn, "__module__", "") or "")
    by_value = module is not None and not _importable(module.__name__)
    if by_value:
        pickler.register_pickle_by_value(module)
    try:
        call = pickler.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise InvalidArgumentError(
            "The function or its arguments cannot be pickled, so kdist cannot send them to workers.",
            received={"fn": fn, "error": f"{type(error).__name__}: {error}"},
            hint="Create files, locks, models and devices inside the function.",
        ) from error
    finally:
        if by_value:
            pickler.unregister_pickle_by_value(module)
    # Two layers, because unpickling the call may need the import path from the outer layer.
    return pickle.dumps((None if path is None else list(path), call))


def _importable(name: str) -> bool:
    """Returns whether a new process with the same path can import a module (a test module may fail)."""
    if name == "__main__":
        return True  # cloudpickle pickles its contents by value anyway
    loaded = sys.modules.pop(name)  # otherwise, find_spec returns the cached spec
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False
    finally:
        sys.modules[name] = loaded


@dataclasses.dataclass
class Result:
    """The result of a call: a value, or an exception with its traceback."""

    ok: bool
    pickled: bytes | None
    summary: str = ""
    traceback: str = ""

    def value(self) -> Any:
        """Unpickles and returns the value."""
        return pickle.loads(self.pickled or b"")

    def exception(self) -> BaseException | None:
        """Unpickles and returns the exception, or returns `None` if it cannot be unpickled here."""
        try:
            error = pickle.loads(self.pickled or b"")
        except Exception:  # its class may exist only in the worker
            return None
        return error if isinstance(error, BaseException) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `kdist.launch`, with all environment variables of the workers in `env`."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    num_workers: int | str
    backend: str | None
    env: Mapping[str, str]
    timeout: float | None
    resources: Mapping[str, float] | None
    num_ps: int = 0


@dataclasses.dataclass
class Ended:
    """The outcome of one worker."""

    index: int
    exit_code: int | None  # from `subprocess`; negative for a signal
    lines: list[str]  # the last lines of its stderr
    result: Result | None  # `None` if the worker did not return one
    has_lost_another: bool = False  # it reported that it failed because another worker had exited
    role: str = "worker"

    @property
    def name(self) -> str:
        """The name of the worker in messages."""
        return task_name(self.role, self.index)


@dataclasses.dataclass
class Ending:
    """The outcome of all workers."""

    workers: list[Ended]  # all workers that ran the function, by index
    failed: Ended | None = None  # the worker that failed first
    unfinished: list[Ended] = dataclasses.field(default_factory=list)  # at the timeout


def perform(data: bytes) -> Result:
    """Runs a packed call. Errors become part of the result."""
    try:
        path, call = pickle.loads(data)
        if path is not None:
            sys.path[:] = path
        fn, args, kwargs = pickle.loads(call)
        value = fn(*args, **kwargs)
        try:
            return Result(True, cloudpickle().dumps(value))
        except Exception as error:
            raise LaunchError(
                "The result of the function cannot be pickled, so kdist cannot send it back.",
                received={
                    "fn": fn,
                    "type": type(value).__name__,
                    "error": f"{type(error).__name__}: {error}",
                },
                hint="Return plain Python values or NumPy arrays.",
            ) from error
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        return Result(False, _pickle_error(error), f"{type(error).__name__}: {error}", text)


def main(argv: Sequence[str]) -> None:
    """Runs a worker of `kdist.launch(fn)`: the call in the file `argv[0]`. Writes the result to the file `argv[1]`."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    payload, destination = argv
    with open(payload, "rb") as file:
        data = file.read()
    sys.argv = ["kdist.launch"]
    result = perform(data)
    # Renamed only when complete, so that a worker that is killed during the write leaves no result.
    with open(f"{destination}.part", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{destination}.part", destination)
    if not result.ok:
        sys.stdout.flush()
        sys.stderr.flush()
        # At exit, frameworks wait for their peers. The launcher terminates these after this process exits.
        os._exit(1)


def _pickle_error(error: BaseException) -> bytes | None:
    try:
        pickled = cloudpickle().dumps(error)
        pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
        return pickled
    except Exception:
        return None


def last_stacks(lines: Sequence[str]) -> list[str]:
    """Returns the last stacks that `faulthandler` printed to a worker's stderr, or the last lines."""
    starts = [i for i, line in enumerate(lines) if re.match(r"(Current thread|Thread) 0x", line)]
    if not starts:
        return list(lines[-10:])
    first = starts[-1]
    for position in reversed(starts):  # in a dump, the current thread comes last
        if position != first and lines[first].startswith("Thread") and lines[position].startswith("Current"):
            break
        first = position
    dump = list(lines[first:])
    half = _MOST_LINES // 2
    return dump if len(dump) <= _MOST_LINES else [*dump[:half], "  …", *dump[-half:]]
