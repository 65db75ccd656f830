"""Chooses the tests that `make test` runs: the choice changes with every commit, so that all tests run regularly.

For example, a test with the mark `in_turn(3)` and one item per backend runs on each backend within three turns.
"""

from __future__ import annotations

import collections
import functools
import os
import subprocess
import zlib
from collections.abc import Iterable

import pytest

from tests.helpers.environment import ROOT

VARIABLE = "TESTS_TURN"


@functools.cache
def turn() -> int:
    """Returns the number of commits, or the value of `TESTS_TURN`; 0 in an archive without git."""
    given = os.environ.get(VARIABLE)
    if given is None:
        command = ["git", "rev-list", "--count", "HEAD"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
        except OSError:
            return 0
        given = done.stdout.strip() or "0"
    return int(given)


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Marks the items of tests with `in_turn(number)` as `full`, except every `number`-th item.

    Each turn runs the next items. The first item depends on the module, so that all tests of a module use the same
    backend in a turn and share its workers.
    """
    places: collections.Counter[str] = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("in_turn")
        if mark and not item.get_closest_marker("full"):
            test = item.nodeid.partition("[")[0]
            first = zlib.crc32(test.partition("::")[0].encode()) + turn()
            if (places[test] + first) % mark.args[0]:
                item.add_marker(pytest.mark.full)
            places[test] += 1
