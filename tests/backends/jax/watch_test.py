"""Reports of a lost worker: an error in a thread that gathers messages has not reached the user yet."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kdist.errors import WorkerLostError
from tests.backends.where import in_worker

if in_worker:
    from kdist.backends.jax.watch import Watch


def _watch():
    """Returns a watch of worker 0 that has lost worker 1, without its thread."""
    made = object.__new__(Watch)
    made._cluster = SimpleNamespace(worker_names=("worker 0", "worker 1"), worker_index=0, is_chief=True)
    made._lost = {1: "it died"}
    made._timeout = 1.0
    made._explained = made._leaving = False
    made._others = [1]
    made._changed = threading.Condition()
    return made


def test_who_asks_for_the_user_tells_the_user():
    watch = _watch()
    with pytest.raises(WorkerLostError, match="worker 1: it died"):
        watch.check(1)
    assert watch._explained


def test_a_thread_that_asks_tells_nobody():
    watch = _watch()
    with pytest.raises(WorkerLostError, match="worker 1: it died"):
        watch.check(1, tells=False)
    assert "worker 1" in str(watch.explain(RuntimeError("connection reset"), tells=False))
    assert not watch._explained, "A main thread that hangs in a collective would never be ended."
    watch.has_told()
    assert watch._explained
