"""A test fails if it imports a framework in the process of pytest, also under pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.scripts import run_python

HOOK = "from tests.helpers.own_process import pytest_runtest_teardown\n"
IMPORTS = "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n\ndef test_it():\n    pass\n"


@pytest.mark.kills("framework_in_own_process_allowed")
@pytest.mark.parametrize("processes", ["0", "2"])
def test_an_imported_framework_fails(processes: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "imports_test.py").write_text(IMPORTS)
    options = ("-n", processes, "-p", "no:cacheprovider", "-p", "no:kdist")
    done = run_python("-m", "pytest", *options, "imports_test.py", cwd=tmp_path, code=1)
    assert "has imported torch, in imports_test.py" in done.stdout
