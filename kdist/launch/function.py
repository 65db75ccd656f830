"""`kdist.launch(fn)`: runs a function in several new worker processes and returns their results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kdist.cluster import environment, logs
from kdist.errors import (
    InvalidArgumentError,
    LaunchError,
    WorkerTimeoutError,
    check_call,
    check_positive,
    check_whole,
)
from kdist.launch import local_workers, ray_workers, report, shipping
from kdist.launch.options import is_variable
from kdist.launch.shipping import Call, Ended, Ending

T = TypeVar("T")

_PLACES: dict[str, Callable[[Call], Ending]] = {"processes": local_workers.run, "ray": ray_workers.run}


def launch(
    fn: Callable[..., T],
    num_workers: int | str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, object] | None = None,
    timeout: float | None = None,
    on: str = "processes",
    resources: Mapping[str, float] | None = None,
    num_ps: int = 0,
) -> list[T]:
    """Runs a function in several new worker processes, on this machine or on a Ray cluster.

    Each worker is a new Python process with `TF_CONFIG` and torchrun's variables, as with `kdist run`. The
    function is sent with `cloudpickle`, so you can define it in a notebook. A script does not need
    `if __name__ == "__main__"`. Each line of output starts with the name of the worker.

    On Ray, `launch` uses the cluster that this process is connected to, or connects to the cluster in
    `RAY_ADDRESS` or on this machine. If there is none, it starts a cluster and stops it at the end. Either
    all workers start or none. kdist and the backend must be installed on all machines of the cluster.

    With `num_ps`, only the coordinator runs the function. Until it returns, all workers and parameter servers
    run a `kdist.Server`.

    Args:
        fn: The function. Import the framework inside it, because the workers can use another Keras backend.
        num_workers: The number of workers. "auto" starts one worker per GPU of this machine, or one worker if
            there is no GPU, as with `kdist run`. On Ray, it starts as many workers as fit on the cluster.
        args: The positional arguments of `fn`, the same for all workers.
        kwargs: The keyword arguments of `fn`.
        backend: The Keras backend of the workers; by default `KERAS_BACKEND`.
        env: Additional environment variables for the workers.
        timeout: The time limit of the job in seconds; by default no limit.
        on: "processes" to run the workers on this machine, or "ray".
        resources: The resources of each worker on a Ray cluster, for example `{"CPU": 4, "GPU": 1}`. By
            default one core, and one GPU if the cluster has GPUs.
        num_ps: The number of parameter servers, on this machine.

    Returns:
        A list with one result per worker; with parameter servers, only the result of the coordinator.

    Raises:
        LaunchError: If a worker fails. The other workers are terminated within a second, or within a few on Ray.
            The message contains the worker's traceback. `__cause__` is its exception, if it can be pickled.
        WorkerTimeoutError: If the workers exceed `timeout`. The message contains their names and stacks.
        BackendError: If the backend is unknown or not installed.
        InvalidArgumentError: If an argument is invalid, Ray is not installed, or its cluster is too small for
            the workers.

    Example:

    ```python
    import kdist

    def double(x):
        import os
        return int(os.environ["RANK"]), 2 * x

    kdist.launch(double, num_workers=2, args=(21,))  # [(0, 42), (1, 42)]
    ```
    """
    logs.set_up()
    check_call(fn, args, kwargs, "kdist.launch(train, num_workers=2, args=(x,)")
    if timeout is not None:
        check_positive("timeout", timeout, "Pass a number of seconds, or None for no limit.")
    if on not in _PLACES:
        raise InvalidArgumentError(
            f"`on` is neither {' nor '.join(map(repr, _PLACES))}.",
            received={"on": on},
            hint='For a Ray cluster: kdist.launch(train, num_workers=2, on="ray")',
        )
    hint = "Pass a number of parameter servers: kdist.launch(train, num_workers=2, num_ps=1)"
    check_whole("num_ps", num_ps, hint, least=0)
    if num_ps and on != "processes":
        raise InvalidArgumentError(
            "kdist.launch cannot start parameter servers on a Ray cluster.",
            received={"num_ps": num_ps, "on": on},
            hint="Start them on this machine: kdist.launch(train, num_workers=2, num_ps=1)",
        )
    for name, value in (env or {}).items():
        if not is_variable(name, value):
            raise InvalidArgumentError(
                "`env` contains a variable with an invalid name or value.",
                received={"name": name, "value": value},
                hint='Pass names and values: env={"OMP_NUM_THREADS": 8}',
            )
    # Hides the job plan by default, because notebooks show stderr in red.
    quiet = {logs.VARIABLE: environment.get(logs.VARIABLE) or "warning"}
    ending = _PLACES[on](
        Call(
            fn=fn,
            args=args,
            kwargs=kwargs or {},
            num_workers=num_workers,
            backend=backend,
            env={**quiet, **{name: str(value) for name, value in (env or {}).items()}},
            timeout=timeout,
            resources=resources,
            num_ps=num_ps,
        )
    )
    if ending.unfinished:
        raise _timeout_error(ending.unfinished, timeout or 0.0)
    if ending.failed is not None:
        _raise_failure(ending.failed)
    return [_value(worker) for worker in ending.workers]


def _timeout_error(unfinished: Sequence[Ended], timeout: float) -> WorkerTimeoutError:
    names = ", ".join(worker.name for worker in unfinished)
    stacks = "\n".join(
        f"Stack of {worker.name}:\n" + "\n".join(shipping.last_stacks(worker.lines)) for worker in unfinished
    )
    return WorkerTimeoutError(
        f"These workers did not finish within {timeout:g} s: {names}.",
        hint=f"Check in the stacks below why they wait, or pass a larger `timeout`.\n{stacks}",
    )


def _raise_failure(failed: Ended) -> None:
    code, result = failed.exit_code or 0, failed.result
    if result is not None and not result.ok:
        error = LaunchError(f"{failed.name} failed: {result.summary}", hint=f"\n{result.traceback}")
    else:
        lines = "\n".join(report.last_traceback(failed.lines, report.MOST_LINES))
        error = LaunchError(f"{failed.name} {report.describe_exit(code)}.", hint=f"\n{lines}")
    error.worker_index = failed.index  # type: ignore[attr-defined]
    error.exit_code = report.shell_exit_code(code)  # type: ignore[attr-defined]
    raise error from (result.exception() if result is not None else None)


def _value(worker: Ended) -> Any:
    if worker.result is None:
        raise LaunchError(
            f"{worker.name} exited without returning a result.",
            received={"exit code": worker.exit_code},
            hint="Return from the function, and do not call sys.exit() or os._exit().",
        )
    try:
        return worker.result.value()
    except (pickle.PickleError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise LaunchError(
            f"This process cannot unpickle the result of {worker.name}.",
            received={"error": f"{type(error).__name__}: {error}"},
            hint="Return plain Python values or NumPy arrays.",
        ) from error
