"""`call_on_all`: an error on one worker raises errors on all workers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kdist.backends.messages import call_on_all, check_equal, gather, of_chief, wait_to_read
from kdist.errors import (
    CheckpointError,
    DatasetError,
    WorkerFailedError,
    WorkerLostError,
    WorkerMismatchError,
    malformed_as,
)


class TwoWorkers:
    """A fake runtime with two workers. The test sets the answer of the other worker."""

    num_workers = 2

    def __init__(self, theirs=None, lost=()):
        self.theirs = theirs
        self.group = self
        self._lost = frozenset(lost)
        self.said = []

    def lost(self):
        return self._lost

    def explain_failure(self, error):
        raise AssertionError("to the engine, a refused connection of the user's looks like a lost worker")

    def all_gather_bytes(self, data, timeout=None):
        message = json.loads(data)
        self.said.append(message)
        return [data, json.dumps({**message, "error": self.theirs, "note": "theirs"}).encode()]


def failed(index, text):
    return CheckpointError(f"worker {index}: {text}")


def fail_with(error):
    def fail():
        raise error

    return fail


def test_all_succeed():
    assert call_on_all(TwoWorkers(), lambda: 3, failed, lambda: "mine") == (3, ["mine", "theirs"])
    assert call_on_all(None, lambda: 3, failed) == (3, [None])


@pytest.mark.kills("failure_of_another_worker_not_told")
def test_the_failure_of_another_one():
    with pytest.raises(CheckpointError, match="worker 1: disk full"):
        call_on_all(TwoWorkers("disk full"), lambda: 3, failed)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("connection refused by nccl-db"), "RuntimeError: connection refused by nccl-db"),
        (CheckpointError("a rule"), "a rule"),
    ],
)
def test_the_own_failure_is_told(error, told):
    runtime = TwoWorkers()
    with pytest.raises(type(error)) as caught:
        call_on_all(runtime, fail_with(error), failed)
    assert caught.value is error
    (said,) = runtime.said
    assert (said["error"], said["note"]) == (told, None)
    assert "messages_test.py" in said["site"]


@pytest.mark.parametrize("runtime", [TwoWorkers(), TwoWorkers(lost=[1])])
def test_whoever_has_lost_a_worker_tells_nobody(runtime):
    error = OSError("gone") if runtime.lost() else WorkerLostError("gone")
    with pytest.raises(type(error)):
        call_on_all(runtime, fail_with(error), failed)
    assert runtime.said == []


class Recorded:
    """A fake runtime. The test sets the facts of the other worker, which sends the same kind of message."""

    num_workers = 2

    def __init__(self, worker_index=0, theirs=None):
        self.worker_index = worker_index
        self.theirs = theirs
        self.group = self
        self.sizes = []

    def all_gather_bytes(self, data, timeout=None):
        self.sizes.append(len(data))
        message = self.said = json.loads(data)
        other = message if self.theirs is None else self.theirs
        if isinstance(message, dict) and "note" in message and self.theirs is not None:
            other = message | {"facts": "another digest"}
        return [data, json.dumps(other).encode()]


@pytest.mark.kills("long_facts_to_all_workers")
def test_facts_are_sent_only_if_they_differ():
    facts = {"variables": [[[i, i], "float32"] for i in range(1000)]}
    same = Recorded()
    assert check_equal(same, "model", facts, "hint", note="mine") == ["mine", "mine"]
    assert len(same.sizes) == 1 and same.sizes[0] < 500
    other = {"variables": [*facts["variables"][:999], [[7, 999], "float32"]]}
    with pytest.raises(WorkerMismatchError, match="differ in variables") as caught:
        check_equal(Recorded(theirs=other), "model", facts, "hint")
    assert caught.value.received == {"worker_0": 999, "worker_1": 7}
    with pytest.raises(WorkerMismatchError, match="differ in rows"):
        check_equal(Recorded(theirs={"batch": 2}), "data", {"batch": 2, "rows": 3}, "hint")


@pytest.mark.kills("sharded_variables_compared_by_name")
def test_sharded_variables_are_compared_by_shape_and_not_by_name():
    def variable(path, shape):
        return SimpleNamespace(path=path, shape=shape, dtype="float32")

    other = Recorded(worker_index=1)
    wait_to_read(other, [variable("dense/kernel", (3, 4))])
    wait_to_read(Recorded(theirs=other.said), [variable("dense_1/kernel", (3, 4))])
    with pytest.raises(WorkerMismatchError, match="worker 1 read sharded variables of different shapes"):
        wait_to_read(Recorded(theirs=other.said), [variable("dense/kernel", (4, 3))])


class InAStep(TwoWorkers):
    """A fake runtime. The other worker sends gradients."""

    def all_gather_bytes(self, data, timeout=None):
        return [data, np.float32([-0.3, 0.7]).tobytes()]


@pytest.mark.kills("gradients_read_as_a_message")
def test_a_worker_in_a_step_called_another_method():
    with pytest.raises(WorkerMismatchError, match="called different methods") as caught:
        check_equal(InAStep(), "model", {"rows": 3}, "hint")
    assert "a training step" in caught.value.received["worker_1"]


class Failed(TwoWorkers):
    """The other worker has failed in a callback, while this worker gathers values without a subject."""

    def all_gather_bytes(self, data, timeout=None):
        return [
            data,
            json.dumps({"subject": "callbacks", "site": "a.py:1 in f", "error": "OSError: no"}).encode(),
        ]


@pytest.mark.kills("failure_taken_for_a_value")
def test_the_failure_of_another_worker_is_no_value():
    for value in (False, {"steps": 3}, [1, 2]):
        with pytest.raises(WorkerFailedError, match="Worker 1 failed: OSError: no"):
            gather(Failed(), value)


@pytest.mark.kills("other_workers_send_unused_values")
def test_only_the_chief_sends_its_value():
    assert of_chief(Recorded(), "x" * 1000) == "x" * 1000
    other = Recorded(worker_index=1)
    of_chief(other, "x" * 1000)
    assert other.sizes == [len("null")]


@pytest.mark.kills("malformed_dtype_is_a_syntax_error")
def test_a_malformed_dtype_is_an_error_of_kdist():
    with pytest.raises(DatasetError, match="SyntaxError"), malformed_as(DatasetError):
        np.dtype(",f4")
