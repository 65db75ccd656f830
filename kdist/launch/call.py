"""A function that is to run in several workers, and what came of it, wherever they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster.roles import task_name
from kdist.launch.shipping import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What `kdist.launch` was asked for.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_workers: How many workers run it, or "auto".
        backend: Their Keras backend; `None` for what the environment says.
        env: More environment variables for them.
        timeout: How many seconds the whole job may take; `None` for as long as it needs.
        resources: What each worker gets of a cluster; `None` for what is usual there.
        num_ps: How many parameter servers there are; with some, a coordinator alone runs the function.
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
    """How one worker has ended.

    Args:
        index: Its number.
        exit_code: That of `subprocess`: negative for a signal.
        lines: The last lines of its stderr.
        result: What it has told; `None` if it did not come so far.
        has_lost_another: Whether it says that it failed because another worker had ended.
        role: What kind of task it is.
    """

    index: int
    exit_code: int | None
    lines: list[str]
    result: Result | None
    has_lost_another: bool = False
    role: str = "worker"

    @property
    def name(self) -> str:
        """How messages name it."""
        return task_name(self.role, self.index)


@dataclasses.dataclass
class Ending:
    """How all of them have ended.

    Args:
        workers: All that run the function, in their order.
        failed: The one that failed first.
        unfinished: Those that had not ended when the time was up.
    """

    workers: list[Ended]
    failed: Ended | None = None
    unfinished: list[Ended] = dataclasses.field(default_factory=list)
