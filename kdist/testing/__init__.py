"""Helpers for tests: functions in several worker processes, and what a test must not leave behind."""

from __future__ import annotations

from kdist.cluster import free_ports
from kdist.testing.leaks import Snapshot, check, no_leaks, snapshot
from kdist.testing.pool import PoolTimeoutError, WorkerFailure, WorkerPool

__all__ = [
    "PoolTimeoutError",
    "Snapshot",
    "WorkerFailure",
    "WorkerPool",
    "check",
    "free_ports",
    "no_leaks",
    "snapshot",
]
