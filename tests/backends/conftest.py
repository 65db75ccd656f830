"""Runs the tests of a directory in the kept worker of its backend, because they test only this backend.

The worker imports the test module itself. Frameworks are imported at the head of the module where `in_worker` is true,
so that pytest's own process, which only collects, imports none. The tests of `*_multi_process_test.py` run in pytest's
process as anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.helpers.processes import run

# Less than pytest's own limit, so that a hang is cut off here, with all stacks.
LIMIT = 150.0


def _in_worker(item: pytest.Item) -> bool:
    return not item.path.stem.endswith("_multi_process_test")


def pytest_itemcollected(item: pytest.Item) -> None:
    if _in_worker(item):
        item.add_marker(pytest.mark.xdist_group(f"backends-{item.path.parent.name}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a test with its arguments in the worker instead of here."""
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
