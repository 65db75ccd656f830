"""Reports of a lost worker: an error in a thread that gathers messages has not reached the user yet."""

from __future__ import annotations

import threading
import time
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


@pytest.mark.kills("jax_closed_connection_names_no_worker", "jax_worker_without_fault_named")
@pytest.mark.parametrize("said", [None, "it failed: ValueError", "it lost another worker"])
def test_a_sum_in_shared_memory_names_the_worker_that_closed_its_connection(said):
    watch = _watch()
    watch._lost, watch._gone, watch._working = {}, set(), 0
    watch._timeout = 60.0 if said != "it lost another worker" else 1.0
    watch._store = SimpleNamespace(get=lambda key, seconds: said and said.encode())
    watch._culprits_among = lambda indices: {}  # the service has no messages yet
    watch._start = lambda function: None
    error = RuntimeError("INTERNAL: Connection closed: worker 1 closed the connection")
    start = time.monotonic()
    explained = watch.explain(error)
    if said == "it lost another worker":
        assert explained is error
    else:
        assert isinstance(explained, WorkerLostError) and (said or "it died") in str(explained)
        assert time.monotonic() - start < 5.0, "The heartbeats would take longer."
