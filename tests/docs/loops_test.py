"""The examples of the page on custom training loops run on every backend if they are pasted into one script."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS
from tests.helpers.scripts import Script


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_the_loop_of_the_page_learns_classes(backend, tmp_path):
    page = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    examples = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert "strategy = kdist.MirroredStrategy()" in examples
    on_two = examples.replace("MirroredStrategy()", 'MirroredStrategy(["cpu:0", "cpu:1"])')
    script = Script(tmp_path, "loop", on_two, {"KERAS_BACKEND": backend}).finish()
    *_, last, total, seen = (line.split() for line in script.stdout().splitlines())
    assert last[0] == "4" and float(last[2]) > 0.9
    assert 0 < float(total[0]) < 10
    # The sum of the first batch, by NumPy.
    rng = np.random.default_rng(0)
    y = rng.integers(10, size=2000)
    x = rng.normal(size=(10, 64))[y] + rng.normal(size=(2000, 64))
    assert float(seen[0]) == pytest.approx(x[:128].sum(), rel=1e-4)
