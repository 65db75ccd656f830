"""The tutorials, executed unchanged on each backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import ROOT, clean_environment
from tests.processes import BACKENDS

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), end="")
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial: Path, backend: str, tmp_path: Path) -> None:
    own = {"KERAS_BACKEND": backend}
    # Jupyter, IPython and matplotlib must not read or write what belongs to the user.
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        own[name] = str(tmp_path / name.lower())
    process = subprocess.Popen(
        [sys.executable, "-c", EXECUTE, str(tutorial)],
        cwd=tmp_path,
        env=clean_environment() | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # nbclient ends its kernel then
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"not finished within 240 s\n{output}")
    assert process.returncode == 0, output
    assert f"on {backend}, 2 replicas" in output
    assert "The runs agree." in output


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_stored_without_outputs(tutorial: Path) -> None:
    cells = json.loads(tutorial.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
