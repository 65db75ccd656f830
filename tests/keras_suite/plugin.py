"""Runs Keras's own tests as a pytest plugin, with a strategy's scope and a time limit.

It writes each line of the results at once. If a process dies, they therefore contain the test that was
running.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.keras_suite.comparison import BEGUN, read_results


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="append the outcome of each test to this file")
    parser.addoption("--in-scope", action="store_true", help="each test in the scope of two CPU devices")
    parser.addoption("--but-passed-in", type=Path, help="leave out what has passed in this file of results")
    parser.addoption("--limit", type=float, help="seconds a test may take; the process ends after them")


# First, because Keras's conftest.py starts the framework, and after that it cannot have two devices.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config), "keras-suite-recorder")


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._path = config.getoption("--results")
        self._limit = config.getoption("--limit")
        self._done = set(read_results(self._path))
        other = config.getoption("--but-passed-in")
        if other:
            self._done |= {test for test, o in read_results(other).items() if o.outcome == "passed"}
        self._failure = ""
        self._outcome = "passed"
        # pytest captures the stderr of tests, but the report of a hang must go to the real stderr.
        self._stderr = os.dup(2)
        self._strategy: Any = None
        if config.getoption("--in-scope"):
            import kdist

            self._strategy = kdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def _write(self, test: str, outcome: str, line: str = "", seconds: float = 0.0) -> None:
        entry = {"test": test, "outcome": outcome, "line": line, "seconds": round(seconds, 2)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self._done:
            self._write(report.nodeid, "not collected", _last_line(report))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skips the tests that are already done, possibly in an earlier process that died."""
        items[:] = [item for item in items if item.nodeid not in self._done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._write(item.nodeid, BEGUN)
        self._outcome, self._failure, start = "passed", "", time.monotonic()
        # A C thread ends the process, even if the test holds Python's lock.
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stderr)
        try:
            return (yield)
        except BaseException as error:  # an error in pytest itself, for example in a report, ends the process
            self._outcome, self._failure = "died", f"pytest failed: {error!r}"
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._write(item.nodeid, self._outcome, self._failure, time.monotonic() - start)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Wraps only the test's method, because setUp calls `clear_session`, which a scope does not allow."""
        if self._strategy and isinstance(item, pytest.Function):
            item.obj = _inside(self._strategy, item.obj)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst of a test's reports: of its phases, and of its subtests."""
        if report.failed and self._outcome != "failed":
            self._outcome, self._failure = "failed", _last_line(report)
        elif report.skipped and self._outcome == "passed":
            self._outcome, self._failure = "skipped", _last_line(report)


def _inside(strategy: Any, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def in_scope(*args: object, **kwargs: object) -> object:
        with strategy.scope():
            return function(*args, **kwargs)

    return in_scope


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the type of an error and the last line of its message, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = text.partition(":")[0] if crash else ""
    last = lines[-1] if lines else "no message"
    return last if last.startswith(kind) else f"{kind}: {last}"
