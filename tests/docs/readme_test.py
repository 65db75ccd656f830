"""The README runs as printed, and its table of the contract is up to date."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.contract import table
from tests.contract.case import CASES
from tests.contract.configuration import CONFIGURATIONS
from tests.helpers.environment import ROOT
from tests.helpers.scripts import run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 80


def test_the_example_runs_on_two_workers_with_the_command_below_it(tmp_path: Path) -> None:
    (difference,) = code_blocks(README, "diff")
    lines = difference.splitlines()
    assert len(lines) <= 12 and not [line for line in lines if line.startswith("-")]
    assert len([line for line in lines if line.startswith("+")]) == 3, (
        "the README says that three lines are new"
    )
    (tmp_path / "train.py").write_text("\n".join(line[1:] for line in lines), encoding="utf-8")
    command = re.search(r"\$ kdist (run .* train\.py)$", README, re.MULTILINE)
    assert command, "the README shows how to start its example"
    done = run_python("-m", "kdist", *command[1].split(), cwd=tmp_path, KERAS_BACKEND="jax")
    shown = code_blocks(README, "text")[0]
    assert shown.splitlines()[1] in done.stderr
    for losses in (*re.findall(r"loss: .*", shown), *re.findall(r"is (\d\.\d+) on JAX", README)):
        assert losses in done.stdout
    assert "[worker 0] Epoch 5/5" in done.stdout
    assert "[worker 1] Epoch" not in done.stdout


def test_the_comparisons_are_as_many_as_the_readme_says() -> None:
    (said,) = re.findall(r"more than ([\d,]+) comparisons", README)
    results = json.loads((ROOT / "docs" / "contract.json").read_text(encoding="utf-8"))
    assert len(results) > int(said.replace(",", ""))


def test_the_table_says_what_the_contract_s_results_say() -> None:
    results = json.loads((ROOT / "docs" / "contract.json").read_text(encoding="utf-8"))
    assert table.replace_table(CONTRACT, results) == CONTRACT, "run `make table`"
    cells = {
        f"{backend}-{configuration.name}-{case.name}"
        for case in CASES.values()
        for configuration in CONFIGURATIONS.values()
        for backend in case.backends
        if configuration.can(case.name, backend)
    }
    # A mark counts all cells of its row. The table shows "not run" for a new row until a full run.
    run = {cell.rsplit("-", 1)[1] for cell in results}
    assert results.keys() == {cell for cell in cells if cell.rsplit("-", 1)[1] in run}, "run `make table`"
    assert set(results.values()) == {"passed"}


@pytest.mark.kills("docs_table_forgets_what_failed", "table_counts_what_did_not_run", "table_hides_failures")
def test_the_table_shows_what_failed_and_what_was_not_run() -> None:
    results = json.loads((ROOT / "docs" / "contract.json").read_text(encoding="utf-8"))
    results["jax-mirrored-2-adam"] = "failed"
    results = {cell: result for cell, result in results.items() if cell != "torch-workers-3-adam"}
    results = {cell: result for cell, result in results.items() if not cell.endswith("-ema")}
    lines = table.table(results).splitlines()
    assert "momentum; `AdamW`" in " ".join(lines)  # the list does not contain `Adam`
    assert "| `Adam` | ✓ 7/7 | ✗ 11/12 | ✓ 9/10 |" in lines
    assert "| moving average of the weights (EMA) | not run | not run | not run |" in lines


def test_links_between_files_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_extras_that_pages_name_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        named.update(re.findall(r"pip install '(?:\.|kdist)\[(\w+)\]'", page.read_text(encoding="utf-8")))
    assert {"jax", "torch", "tensorflow"} <= named <= set(project["optional-dependencies"])
