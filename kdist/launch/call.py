"""The arguments and results of `kdist.launch`, for workers on this machine and on Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster.roles import task_name
from kdist.launch.shipping import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `kdist.launch`.

    Args:
        fn: The function.
        args: The positional arguments of the function.
        kwargs: The keyword arguments of the function.
        num_workers: The number of workers, or "auto".
        backend: The Keras backend of the workers; `None` for the backend of the environment.
        env: Additional environment variables of the workers.
        timeout: The time limit of the job in seconds; `None` for no limit.
        resources: The resources of each worker on a Ray cluster; `None` for the default.
        num_ps: The number of parameter servers. If it is positive, only the coordinator runs the function.
    """

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
    """The outcome of one worker.

    Args:
        index: The index of the worker.
        exit_code: The exit code from `subprocess`, which is negative for a signal.
        lines: The last lines of its stderr.
        result: The result of the function; `None` if the worker did not return one.
        has_lost_another: Whether it reported that it failed because another worker had exited.
        role: The role of the task.
    """

    index: int
    exit_code: int | None
    lines: list[str]
    result: Result | None
    has_lost_another: bool = False
    role: str = "worker"

    @property
    def name(self) -> str:
        """The name of the worker in messages."""
        return task_name(self.role, self.index)


@dataclasses.dataclass
class Ending:
    """The outcome of all workers.

    Args:
        workers: All workers that ran the function, by index.
        failed: The worker that failed first.
        unfinished: The workers that had not finished at the timeout.
    """

    workers: list[Ended]
    failed: Ended | None = None
    unfinished: list[Ended] = dataclasses.field(default_factory=list)
