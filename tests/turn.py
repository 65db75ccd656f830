"""Which part of a product `make test` runs today: the choice moves on with every commit, so that nothing is left out.

A test of a pool meets each backend within three turns, and a case of the contract each kind of storage within eighteen.
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
    """Marks items `full` whose test has the mark `in_turn(number)`, except every `number`-th of them.

    With every turn the next items run. The first item depends on the module: its tests use one backend per turn, and
    share its workers.
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
