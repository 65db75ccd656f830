"""Tests of single backends: the tests in a directory run in the long-lived worker of its backend.

The worker imports the test module itself. Modules import frameworks at the top only if `in_worker` is true.
Pytest's own process only collects these tests, so it imports no framework. The tests in
`*_multi_process_test.py` run in pytest's process, as in other directories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.helpers.processes import run

# Less than pytest's own limit, so that this limit ends a hang and shows all stacks.
LIMIT = 150.0


def _in_worker(item: pytest.Item) -> bool:
    return not item.path.stem.endswith("_multi_process_test")


def pytest_itemcollected(item: pytest.Item) -> None:
    if _in_worker(item):
        item.add_marker(pytest.mark.xdist_group(f"backends-{item.path.parent.name}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a test with its arguments in the worker instead of in this process."""
    if not _in_worker(pyfuncitem):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run(pyfuncitem.path.parent.name, 1, _call, pyfuncitem.function, arguments, timeout=LIMIT)
    return True


def _call(test: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    try:
        test(**arguments)
    finally:
        for argument in arguments.values():  # pytest undoes its own copy, in its own process
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()
