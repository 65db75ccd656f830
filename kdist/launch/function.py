"""`kdist.launch(fn)`: run a function in several fresh worker processes and return their results."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.errors import InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch import report, shipping
from kdist.launch.output import sinks
from kdist.launch.plan import JobPlan, check_backend, plan_job, resolve_num_workers
from kdist.launch.supervisor import Outcome, Supervisor
from kdist.launch.worker_process import WorkerProcess


def launch(
    fn: Callable[..., Any],
    num_workers: int | str = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, object] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Runs a function in several fresh worker processes of this machine.

    Each worker is a new Python that has `TF_CONFIG` and torchrun's variables set, as under `kdist run`. The
    function is shipped with `cloudpickle`, so it may be defined in a notebook or in the main script, which
    needs no `if __name__ == "__main__"`. What the workers print appears with their name in front.

    Args:
        fn: The function. Import the framework inside it: this process's Keras backend is not the workers'.
        num_workers: How many workers, or "auto": one a GPU, else one a core.
        args: Its positional arguments, the same for all workers.
        kwargs: Its keyword arguments.
        backend: The Keras backend of the workers; by default what `KERAS_BACKEND` says.
        env: More environment variables for the workers.
        timeout: How many seconds the whole job may take; by default as long as it needs.

    Returns:
        What the function returned, one entry a worker.

    Raises:
        LaunchError: If a worker fails; the others are ended within a second. The message has the worker's
            traceback, and `__cause__` is its exception where that can be pickled.
        WorkerTimeoutError: If the workers take longer than `timeout`; the message names them and shows what
            each was doing.
        BackendError: If the backend is unknown or not installed.

    Example:

    ```python
    import kdist

    def double(x):
        import os
        return int(os.environ["RANK"]), 2 * x

    kdist.launch(double, num_workers=2, args=(21,))  # [(0, 42), (1, 42)]
    ```
    """
    if not callable(fn):
        raise InvalidArgumentError(
            "`fn` must be a function.",
            received={"fn": fn},
            hint="For example: kdist.launch(train, num_workers=2)",
        )
    if timeout is not None and not timeout > 0:
        raise InvalidArgumentError("`timeout` must be positive.", received={"timeout": timeout})
    check_backend(backend)
    extra = {name: str(value) for name, value in (env or {}).items()}
    count = resolve_num_workers(num_workers)
    with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
        payload = os.path.join(folder, "function")
        with open(payload, "wb") as file:
            file.write(shipping.pack_call(fn, tuple(args), dict(kwargs or {})))
        plan = plan_job(count, backend=backend, extra=extra)
        workers, outcome = _run(plan, folder, payload, timeout)
        results = [_read_result(folder, worker.plan.index) for worker in workers]
    if outcome.unfinished:
        raise _timeout_error(outcome, timeout or 0.0)
    if outcome.failed is not None:
        _raise_failure(outcome.failed, results[outcome.failed.plan.index])
    return [_value(worker, result) for worker, result in zip(workers, results, strict=True)]


def _run(
    plan: JobPlan, folder: str, payload: str, timeout: float | None
) -> tuple[list[WorkerProcess], Outcome]:
    out, err = sinks()
    prefixed = plan.num_workers > 1
    workers = [
        WorkerProcess(
            worker,
            shipping.worker_command(
                "kdist.launch.function_worker", payload, _result_path(folder, worker.index)
            ),
            out,
            err,
            prefix=f"[{worker.name}] " if prefixed else "",
        )
        for worker in plan.workers
    ]
    supervisor = Supervisor(workers, plan, timeout=timeout)
    return workers, supervisor.run()


def _result_path(folder: str, index: int) -> str:
    return os.path.join(folder, f"result-{index}")


def _read_result(folder: str, index: int) -> shipping.Result | None:
    with contextlib.suppress(FileNotFoundError), open(_result_path(folder, index), "rb") as file:
        return pickle.load(file)
    return None


def _timeout_error(outcome: Outcome, timeout: float) -> WorkerTimeoutError:
    names = ", ".join(worker.name for worker in outcome.unfinished)
    stacks = "\n".join(
        f"{worker.name} was here:\n" + "\n".join(shipping.last_stacks(worker.tail.lines()))
        for worker in outcome.unfinished
    )
    return WorkerTimeoutError(
        f"All workers must end within {timeout:g} s; {names} did not.",
        hint=f"Find out what they wait for, or pass a larger `timeout`.\n{stacks}",
    )


def _raise_failure(failed: WorkerProcess, result: shipping.Result | None) -> None:
    code = failed.exit_code or 0
    if result is not None and not result.ok:
        error = LaunchError(f"{failed.name} failed: {result.summary}", hint=f"\n{result.traceback}")
    else:
        lines = "\n".join(report.last_traceback(failed.tail.lines(), report.MOST_LINES))
        error = LaunchError(f"{failed.name} {report.describe_exit(code)}.", hint=f"\n{lines}")
    error.worker_index = failed.plan.index  # type: ignore[attr-defined]
    error.exit_code = report.shell_exit_code(code)  # type: ignore[attr-defined]
    raise error from (result.exception() if result is not None else None)


def _value(worker: WorkerProcess, result: shipping.Result | None) -> Any:
    if result is None:
        raise LaunchError(
            f"{worker.name} ended without a result.",
            received={"exit code": worker.exit_code},
            hint="The function must return; it must not call sys.exit() or os._exit().",
        )
    try:
        return result.value()
    except (pickle.PickleError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{worker.name}'s result must be one that this process can read.",
            received={"error": f"{type(error).__name__}: {error}"},
            hint="Return plain Python values or NumPy arrays.",
        ) from error
