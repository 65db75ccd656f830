"""Runs the launcher's example, which starts its own workers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.docs.examples import example
from tests.helpers.scripts import Script


@pytest.mark.in_turn(4)
def test_the_launchers_example(tmp_path: Path) -> None:
    data = """
        import numpy as np
        draw = np.random.RandomState(0)
        x, y = draw.rand(40, 3), draw.rand(40, 1)
    """
    told = "\nimport json\nprint('LOSSES', json.dumps(losses))\n"
    source = textwrap.dedent(data) + example("launcher_0") + told
    script = Script(tmp_path, "launching", source, {}).finish()
    one, two = script.told("LOSSES ")
    assert one == two and len(one) == 5 and one[-1] < one[0]
