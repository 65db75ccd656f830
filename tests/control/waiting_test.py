"""Log lines that name the missing workers while a process waits for a job to start, at growing intervals."""

from __future__ import annotations

import logging
import types

import pytest

from kdist.control import waiting
from kdist.control.waiting import Waiting

NAMES = ["worker 0 (host0:1)", "worker 1 (host1:1)", "worker 2"]


@pytest.fixture
def now(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(waiting, "time", types.SimpleNamespace(monotonic=lambda: at[0]))
    return at


def test_it_is_said_after_5_s_and_then_at_growing_intervals(now, caplog):
    one = Waiting(NAMES, 300.0)
    said_at = []
    for second in range(301):
        now[0] = 100.0 + second
        assert one.is_due == (second in (5, 10, 20, 40, 80, 160))
        one.note([2, 1])
        if len(caplog.messages) > len(said_at):
            said_at.append(second)
    assert said_at == [5, 10, 20, 40, 80, 160]
    assert caplog.messages[2] == "waiting for worker 1 (host1:1), worker 2 to join (20 of 300 s)"
    assert {record.levelname for record in caplog.records} == {"NOTICE"}


def test_nothing_is_said_where_nobody_is_missing_or_the_time_is_up(now, caplog):
    one = Waiting(NAMES, 30.0)
    now[0] += 7
    one.note([])
    assert one.missing == frozenset()
    now[0] += 30
    one.note([1])  # after the timeout, the caller raises an error
    assert one.missing == {1}, "which names those"
    assert caplog.messages == []


def test_what_was_not_said_in_time_is_said_once(now, caplog):
    one = Waiting(NAMES, 300.0)
    now[0] += 33  # a slow check
    one.note([0])
    one.note([0])
    assert caplog.messages == ["waiting for worker 0 (host0:1) to join (33 of 300 s)"]


def test_of_very_many_the_first_are_named(now, caplog):
    caplog.set_level(logging.INFO, "kdist")
    one = Waiting([f"worker {index}" for index in range(100)], 300.0)
    now[0] += 5
    one.note(range(1, 100))
    assert caplog.messages[0].startswith("waiting for worker 1, worker 2,")
    assert caplog.messages[0].endswith("worker 6 and 93 more to join (5 of 300 s)")
