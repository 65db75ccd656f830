"""`kdist.launch(fn)`: run a function in several fresh worker processes and return their results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kdist.cluster import environment, logs
from kdist.errors import InvalidArgumentError, LaunchError, WorkerTimeoutError
from kdist.launch import local_workers, ray_workers, report, shipping
from kdist.launch.call import Call, Ended, Ending

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
    """Runs a function in several fresh worker processes, of this machine or of a Ray cluster.

    Each worker is a new Python that has `TF_CONFIG` and torchrun's variables set, as under `kdist run`. The
    function is shipped with `cloudpickle`, so it may be defined in a notebook or in the main script, which
    needs no `if __name__ == "__main__"`. What the workers print appears with their name in front.

    On Ray, a cluster that this process is connected to is used, else the one that `RAY_ADDRESS` names or that runs on
    this machine; else one is started here, and stopped at the end. All workers get their place at the same time, or
    none does. kdist and the backend must be installed on the cluster's machines.

    With `num_ps`, the function runs in a coordinator alone. The workers and the parameter servers each run a
    `kdist.Server`, until it returns.

    Args:
        fn: The function. Import the framework inside it: this process's Keras backend is not the workers'.
        num_workers: How many workers. "auto", the default as with `kdist run`, is one a GPU of this machine, or a
            single one without a GPU; on Ray, as many as the cluster has room for.
        args: Its positional arguments, the same for all workers.
        kwargs: Its keyword arguments.
        backend: The Keras backend of the workers; by default what `KERAS_BACKEND` says.
        env: More environment variables for the workers.
        timeout: How many seconds the whole job may take; by default as long as it needs.
        on: Where they run: "processes" for this machine, or "ray".
        resources: What each worker gets of a Ray cluster, such as `{"CPU": 4, "GPU": 1}`; by default a core, and a
            GPU where the cluster has some.
        num_ps: How many parameter servers, on this machine.

    Returns:
        What the function returned, one entry a worker; with parameter servers, one entry, the coordinator's.

    Raises:
        LaunchError: If a worker fails; the others are ended within a second, on Ray within a few. The message has
            the worker's traceback, and `__cause__` is its exception where that can be pickled.
        WorkerTimeoutError: If the workers take longer than `timeout`; the message names them and shows what
            each was doing.
        BackendError: If the backend is unknown or not installed.
        InvalidArgumentError: If an argument cannot be, Ray is not installed, or its cluster has no room for so many
            workers.

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
    if not callable(fn):
        raise InvalidArgumentError(
            "`fn` is not a function.",
            received={"fn": fn},
            hint="Pass a function: kdist.launch(train, num_workers=2)",
        )
    if timeout is not None and not timeout > 0:
        raise InvalidArgumentError(
            "`timeout` is not positive.",
            received={"timeout": timeout},
            hint="Pass a number of seconds, or None for no limit.",
        )
    if on not in _PLACES:
        raise InvalidArgumentError(
            f"`on` is neither {' nor '.join(map(repr, _PLACES))}.",
            received={"on": on},
            hint='For a Ray cluster: kdist.launch(train, num_workers=2, on="ray")',
        )
    if not isinstance(num_ps, int) or num_ps < 0:
        raise InvalidArgumentError(
            "`num_ps` is not an integer of at least 0.",
            received={"num_ps": num_ps},
            hint="Pass a number of parameter servers: kdist.launch(train, num_workers=2, num_ps=1)",
        )
    if num_ps and on != "processes":
        raise InvalidArgumentError(
            "kdist.launch cannot start parameter servers on a Ray cluster.",
            received={"num_ps": num_ps, "on": on},
            hint="Start them on this machine: kdist.launch(train, num_workers=2, num_ps=1)",
        )
    ending = _PLACES[on](
        Call(
            fn=fn,
            args=args,
            kwargs=kwargs or {},
            num_workers=num_workers,
            backend=backend,
            env={**_quiet(), **{name: str(value) for name, value in (env or {}).items()}},
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


def _quiet() -> dict[str, str]:
    """Has workers say no plan: who calls a function knows what it starts, and a notebook shows stderr in red."""
    return {logs.VARIABLE: environment.get(logs.VARIABLE) or "warning"}


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
