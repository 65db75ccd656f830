"""The example of the page on custom training loops runs unchanged on every backend."""

from __future__ import annotations

import re

import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS
from tests.helpers.scripts import Script

DATA = """
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")
dataset = [(x[i : i + 128], y[i : i + 128]) for i in range(0, len(x), 128)]
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.in_turn(3)
def test_the_loop_of_the_page_learns_digits(backend, tmp_path):
    page = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    assert "strategy = kdist.MirroredStrategy()" in example
    on_two = example.replace("MirroredStrategy()", 'MirroredStrategy(["cpu:0", "cpu:1"])')
    script = Script(tmp_path, "loop", DATA + on_two, {"KERAS_BACKEND": backend}).finish()
    last = script.stdout().splitlines()[-1].split()
    assert last[0] == "4" and float(last[2]) > 0.6
