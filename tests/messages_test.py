"""`call_on_all`: an error on one worker raises errors on all workers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kdist.backends.messages import call_on_all
from kdist.errors import CheckpointError, DatasetError, WorkerLostError, malformed_as


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


@pytest.mark.kills("malformed_dtype_is_a_syntax_error")
def test_a_malformed_dtype_is_an_error_of_kdist():
    with pytest.raises(DatasetError, match="SyntaxError"), malformed_as(DatasetError):
        np.dtype(",f4")
