"""Runs the launcher's example, which starts its own workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.examples import example
from tests.helpers.scripts import Script


@pytest.mark.in_turn(4)
def test_the_launchers_example(tmp_path: Path) -> None:
    told = "\nimport json\nprint('LOSSES', json.dumps(losses))\n"
    source = example("launcher_0") + told
    script = Script(tmp_path, "launching", source, {}).finish()
    one, two = script.told("LOSSES ")
    assert one == two and len(one) == 5 and one[-1] < one[0]
