"""Small JSON messages between workers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

from kdist.backends.contract import Runtime
from kdist.cluster import logs
from kdist.errors import (
    DatasetError,
    KdistError,
    WorkerFailedError,
    WorkerLostError,
    WorkerMismatchError,
    WorkerTimeoutError,
    is_library,
)

if TYPE_CHECKING:
    import keras

    from kdist.arrays.types import T


_NOBODY_ANSWERS = (WorkerLostError, WorkerTimeoutError)


def gather(runtime: Runtime, value: T, timeout: float | None = None) -> list[T]:
    """Gathers a JSON value from every worker, in the order of their indices. All must call it."""
    if runtime.num_workers == 1:
        return [value]
    everyone = [
        json.loads(data) for data in runtime.group.all_gather_bytes(json.dumps(value).encode(), timeout)
    ]
    if any(map(_has_subject, everyone)):  # a worker calls another method, or has failed
        _check_subjects([theirs if _has_subject(theirs) else {} for theirs in everyone])
    return everyone


def of_chief(runtime: Runtime, value: T) -> T:
    """Returns the chief's JSON value on every worker. All must call it."""
    # The others send nothing, because each worker receives all messages.
    mine: Any = value if runtime.worker_index == 0 else None
    return gather(runtime, mine)[0]


def call_site() -> str:
    """Returns the current line of the user's code: the innermost line outside of kdist and of libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a line outside of your code"


def exchange(
    runtime: Runtime, subject: str, message: Mapping[str, object], timeout: float | None = None
) -> list[Any]:
    """Gathers the messages of all workers. Raises an error on all workers if they are about different subjects."""
    everyone = _gather_about(runtime, subject, message, timeout)
    _check_subjects(everyone)
    return everyone


def _gather_about(
    runtime: Runtime, subject: str, message: Mapping[str, object], timeout: float | None = None
) -> list[dict[str, Any]]:
    """Gathers messages with a subject. A worker that sends another message, for example in a step, has an empty one."""
    mine = {"subject": subject, "site": call_site(), **message}
    if runtime.num_workers == 1:
        return [mine]
    everyone = map(_parsed, runtime.group.all_gather_bytes(json.dumps(mine).encode(), timeout))
    return [theirs if _has_subject(theirs) else {} for theirs in everyone]


def _has_subject(message: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(message, dict) and "subject" in message


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:  # the gradients of a step are no JSON
        return None


def _check_subjects(said: Sequence[dict[str, Any]]) -> None:
    # First, because a worker that fails leaves its method, while the others continue.
    for index, theirs in enumerate(said):
        if theirs.get("error") is not None:
            hint = f"Read the traceback of worker {index}."
            failure = WorkerFailedError(
                f"Worker {index} failed: {theirs['error']}", received={"failed_worker": index}, hint=hint
            )
            failure.others_answer = False
            raise failure
    for index, theirs in enumerate(said[1:], start=1):
        if theirs.get("subject") != said[0].get("subject"):
            both = [
                f"{each['subject']}, at {each['site']}"
                if each
                else "another message, for example from a training step"
                for each in (said[0], theirs)
            ]
            raise WorkerMismatchError(
                f"Worker 0 and worker {index} called different methods.",
                received={"worker_0": both[0], f"worker_{index}": both[1]},
                hint="Call `fit`, `evaluate`, `predict`, `save`, `restore`, `scope` and the methods of strategies on "
                "every worker, in the same order. Remove branches for the chief (`if strategy.cluster_resolver.task_id "
                "== 0:`). Also read sharded variables on every worker.",
            )


def check_equal(
    runtime: Runtime,
    what: str,
    facts: Mapping[str, object],
    hint: str,
    note: Any = None,
    timeout: float | None = None,
) -> list[Any]:
    """Raises the same error on all workers unless all have the same facts. All workers must call it.

    Args:
        runtime: The runtime whose workers are compared.
        what: The subject of the error message, for example "model" or "arguments of fit".
        facts: Names and JSON values. Lists are compared item by item, to find the first difference.
        hint: The hint of the error.
        note: A JSON value of this worker, sent in the same message. It can differ.
        timeout: Seconds to wait for the others (default: the strategy's `timeout_seconds`).

    Returns:
        The note of each worker.

    Raises:
        WorkerMismatchError: If a fact differs. The error names the first such fact, with the values of two workers.
    """
    if runtime.num_workers == 1:
        return [note]
    # Facts can be long, such as the shapes of all variables, and each worker receives the messages of all workers.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    messages = exchange(runtime, what, {"facts": digest, "note": note}, timeout)
    if any(message["facts"] != digest for message in messages):
        _raise_difference(gather(runtime, facts, timeout), what, hint)
    _compare_lines(runtime, [message["site"] for message in messages])
    return [message["note"] for message in messages]


def _raise_difference(everyone: Sequence[Mapping[str, object]], what: str, hint: str) -> None:
    # JSON has converted tuples to lists on all workers. Some workers may lack facts of others.
    for name in dict.fromkeys(name for worker in everyone for name in worker):
        value = everyone[0].get(name)
        for index, other in enumerate(everyone[1:], start=1):
            if other.get(name) != value:
                mine, theirs = _first_difference(value, other.get(name))
                raise WorkerMismatchError(
                    f"Worker 0 and worker {index} do not have the same {what}: they differ in {name}.",
                    received={"worker_0": mine, f"worker_{index}": theirs},
                    hint=hint,
                )


@functools.cache  # once per pair of lines
def _warn_of_other_lines(index: int, first: str, other: str) -> None:
    logs.logger.warning(
        "worker 0 and worker %d call a method at different lines: %s and %s. If the lines belong to different calls, "
        "the results are wrong.\nTo avoid this, call methods on every worker in the same order.",
        index,
        first,
        other,
    )


def _compare_lines(runtime: Runtime, sites: Sequence[str]) -> None:
    # Directories can differ between machines. Scripts can also differ between the chief and the other workers.
    lines = [os.path.basename(site) for site in sites]
    files = [line.partition(":")[0] for line in lines]
    index = next((i for i, line in enumerate(lines) if line != lines[0] and files[i] == files[0]), None)
    if index is not None and runtime.worker_index == 0:
        _warn_of_other_lines(index, sites[0], sites[index])


def wait_to_read(runtime: Runtime, variables: Sequence[keras.Variable]) -> None:
    """Waits until all workers read the same sharded variables, because their collectives must match.

    Raises:
        WorkerMismatchError: If a worker does something else.
    """
    reads = [[list(v.shape), str(v.dtype)] for v in variables]
    # Without names, because their counters ("dense_1") depend on earlier models of the worker.
    for index, theirs in enumerate(exchange(runtime, "reading sharded variables", {"reading": reads})):
        if theirs["reading"] != reads:
            raise WorkerMismatchError(
                f"Worker {runtime.worker_index} and worker {index} read sharded variables of different shapes.",
                received={"variable": variables[0].path, "shape": tuple(variables[0].shape)},
                hint="Read, save and restore sharded variables on all workers, outside branches for one worker.",
            )


def _first_difference(a: object, b: object) -> tuple[object, object]:
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b, strict=False):
            if x != y:
                return _first_difference(x, y)
        if len(a) != len(b):
            return f"{len(a)} items", f"{len(b)} items"
    return a, b


def call_on_all(
    runtime: Runtime | None,
    function: Callable[[], T],
    failed: Callable[[int, str], Exception],
    note: Callable[[], Any] = lambda: None,
    subject: str = "a function",
) -> tuple[T, list[Any]]:
    """Calls a function on every worker, waits for all, and raises on all workers if it fails on one.

    The worker where the function failed raises the original error. The others raise the result of `failed`,
    called with the index of that worker and its error message. Without a `runtime`, there are no others. Workers that
    call it for another `subject` cause an error.

    Returns:
        The result of the function on this worker, and each worker's JSON value from `note`, called last.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except Exception as raised:
        # After the loss of a worker, messages are impossible. Do not call `explain_failure` here: it mistakes
        # an error of the user's code, such as a refused connection to a database, for the loss of a worker.
        is_over = isinstance(raised, _NOBODY_ANSWERS) or not getattr(raised, "others_answer", True)
        if runtime is not None and (is_over or runtime.group.lost()):
            raise
        error = raised
    text = None
    if error is not None:
        text = str(error) if isinstance(error, KdistError) else f"{type(error).__name__}: {error}"
    said = {"error": text, "note": None if error else note()}
    try:
        everyone = [said] if runtime is None else _gather_about(runtime, subject, said)
    except Exception:
        if error is None:
            raise
    if error is not None:  # outside of the handler, whose exception would become its context
        raise error
    for index, theirs in enumerate(everyone):
        if theirs.get("subject", subject) == subject and theirs.get("error") is not None:
            raise failed(index, theirs["error"])
    _check_subjects(everyone)
    return result, [theirs["note"] for theirs in everyone]


def read_on_all(runtime: Runtime, what: str, function: Callable[[], T]) -> T:
    """Reads the user's data on every worker, and raises on all if it fails on one; see `call_on_all`.

    `what` is the subject of the error message, for example "The dataset_fn".
    """

    def failed(index: int, text: str) -> Exception:
        hint = "" if "Received:" in text else f"Read the traceback of worker {index}."
        received = {"failed_worker": index}
        return DatasetError(f"{what} failed on worker {index}: {text}", received=received, hint=hint)

    return call_on_all(runtime, function, failed, subject=what)[0]
