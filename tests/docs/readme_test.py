"""The README: its examples run as they stand there, and its table has every case."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.testing.conformance import table
from kdist.testing.conformance.catalogue import catalogue
from tests.environment import ROOT, clean_environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_compile(page: Path) -> None:
    for number, block in enumerate(code_blocks(page.read_text(encoding="utf-8"), "python")):
        compile(block, f"{page.name}, example {number}", "exec")


def test_the_example_runs_on_two_workers_with_the_command_below_it(tmp_path: Path) -> None:
    example = code_blocks(README, "python")[0]
    assert len(example.splitlines()) <= 12
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    command = re.search(r"\$ kdist (run .* train\.py)$", README, re.MULTILINE)
    assert command, "the README shows how to start its example"
    done = subprocess.run(
        [sys.executable, "-m", "kdist", *command[1].split()],
        cwd=tmp_path,
        env=clean_environment() | {"KERAS_BACKEND": "jax"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[worker 0] Epoch 5/5" in done.stdout
    assert "[worker 1] Epoch" not in done.stdout


def test_the_table_has_a_row_for_each_case() -> None:
    _, _, rest = README.partition(table.BEGIN)
    written, end, _ = rest.partition(table.END)
    assert end, "the markers are there, in order"
    first_cells = [
        line.split("|")[1].strip().rstrip(" ¹²³⁴") for line in written.splitlines() if line.startswith("|")
    ]
    missing = [entry.title for entry in catalogue() if entry.title not in first_cells]
    assert not missing, "run `make table`"


def test_the_demos_table_is_the_one_that_the_demo_prints() -> None:
    source = (ROOT / "kdist/demo/__init__.py").read_text(encoding="utf-8")
    (shown,) = [block for block in code_blocks(README, "text") if "one device" in block]
    rows = [line[:29].strip() for line in shown.splitlines() if line.startswith("  ") and line[:29].strip()]
    assert len(rows) == 4
    for row in rows:
        assert f'"{row}"' in source


def test_links_between_files_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or (ROOT / target).exists(), f"{page.name}: {target}"
