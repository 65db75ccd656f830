"""The GAN example, started as its docstring shows, has the same losses as on one device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.environment import ROOT
from tests.helpers.processes import each_backend_in_twelve_turns
from tests.helpers.scripts import run_python

GAN = ROOT / "tutorials" / "gan.py"
STEPS = 6
LOSSES = re.compile(r"(\w+): loss ([\d.]+) in the first step, ([\d.]+) in the last step")
ON_ONE_DEVICE = f"""
import sys
sys.path.insert(0, {str(GAN.parent)!r})
import gan, kdist
for name, losses in zip(("discriminator", "generator"), gan.train(kdist.OneDeviceStrategy("cpu:0"), {STEPS}).T):
    print(f"{{name}}: loss {{losses[0]:.3f}} in the first step, {{losses[-1]:.3f}} in the last step")
"""


def printed(backend: str, folder: Path, *command: str) -> str:
    """Runs Python, which must succeed, and returns its output."""
    told = {"KERAS_BACKEND": backend, "MPLCONFIGDIR": str(folder)}
    return run_python(*command, cwd=folder, timeout=170, **told).stdout


@pytest.mark.timeout(360)
@each_backend_in_twelve_turns
def test_two_workers_have_the_losses_of_one_device(backend: str, tmp_path: Path) -> None:
    assert "kdist run --num-workers 2 gan.py" in GAN.read_text(encoding="utf-8")
    command = ("-m", "kdist", "run", "--num-workers", "2", str(GAN), "--steps", str(STEPS))
    on_two = printed(backend, tmp_path, *command)
    found = {name: (float(first), float(last)) for name, first, last in LOSSES.findall(on_two)}
    on_one = LOSSES.findall(printed(backend, tmp_path, "-c", ON_ONE_DEVICE))
    assert [name for name, _, _ in on_one] == ["discriminator", "generator"] == list(found)
    for name, first, last in on_one:
        assert found[name] == pytest.approx((float(first), float(last)), abs=0.0021)
    assert (tmp_path / "gan.png").stat().st_size > 5_000
    assert "[worker 1] " not in on_two
