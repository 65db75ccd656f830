"""Injects the faults of `kdist run --inject` at named points of the training."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

from kdist.cluster import environment, injection, logs
from kdist.cluster.injection import Fault
from kdist.context import joined_strategy
from kdist.control import whereabouts

_done: set[int] = set()
_SIGNALS = {"kill": "SIGKILL", "sigterm": "SIGTERM", "freeze": "SIGSTOP"}


def point(phase: str, step: int | None = None) -> None:
    """Marks a point where users can make a worker fail. Does nothing unless a fault is requested.

    Args:
        phase: "begin", "step", "validation" or "epoch-end". For a phase of a save, "save-" and its name.
        step: The number of the next training step, from 1 over all epochs; by default the last step.

    Raises:
        RuntimeError: If the fault is "exception".

    Example:

    >>> from kdist import faults
    >>> faults.point("save-write", step=30)
    """
    if _ordered():
        _act(phase, step, 1)


def enter_steps(begin: int, end: int) -> None:
    """Marks the point before training steps that run as one, and records the progress of training.

    Args:
        begin: The index of the first step, from 0 in each epoch.
        end: The index of the last step.
    """
    whereabouts.enter("step", None, begin + 1)
    if _ordered():
        _act("step", whereabouts.total_steps + 1, end - begin + 1)
    whereabouts.total_steps += end - begin + 1


@functools.cache
def _ordered() -> list[Fault]:
    return injection.split(environment.get(injection.VARIABLE))


def _act(phase: str, step: int | None, number: int) -> None:
    for index, fault in enumerate(_ordered()):
        if index in _done or not fault.is_at(phase) or fault.worker not in (None, _worker_index()):
            continue
        if _is_due(fault, phase, whereabouts.total_steps if step is None else step, number):
            if fault.kind != "slow" or fault.step is not None:
                _done.add(index)
            _fail(fault)


def _is_due(fault: Fault, phase: str, step: int, number: int) -> bool:
    if fault.epoch is not None:
        if fault.epoch != whereabouts.epoch:
            return False
        step = whereabouts.step
    if fault.step is None:
        return True
    # Other points are rarer than steps, so the fault happens at the first such point after the step.
    return step <= fault.step < step + number if phase == "step" else step >= fault.step


def _worker_index() -> int:
    strategy = joined_strategy()
    return strategy.runtime.worker_index if strategy is not None else int(environment.get("RANK") or 0)


def _fail(fault: Fault) -> None:
    logs.logger.warning("--inject %s takes effect at %s", fault, whereabouts.describe())
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), getattr(signal, _SIGNALS[fault.kind]))
    elif fault.kind == "exit":
        sys.exit(1)
    elif fault.kind == "exception":
        raise RuntimeError(f"This error was injected by --inject {fault}.")
    elif fault.kind == "slow":
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            sum(range(10_000))
    while fault.kind in ("kill", "hang", "freeze"):
        time.sleep(3600)
