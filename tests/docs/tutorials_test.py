"""The tutorials run unchanged, one per turn, and their stored outputs are up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.docs.outputs import backend_of, difference_of
from tests.helpers.environment import ROOT
from tests.helpers.processes import BACKENDS, full_unless
from tests.notebooks import TUTORIALS, normalized, text_of
from tests.turn import turn

MOST_BYTES = 400_000
# Calls that show output.
SHOWS = ("print", "display", "show")

each_tutorial = pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def runs(place: int, tutorial: Path) -> list[Any]:
    """Returns a case per backend. `make test` runs one tutorial per turn, and each round the next backend."""
    rounds, offset = divmod(turn() + place, len(TUTORIALS))
    return [
        pytest.param(
            tutorial,
            backend,
            id=f"{tutorial.stem}-{backend}",
            marks=full_unless(offset == 0 and index == rounds % len(BACKENDS)),
        )
        for index, backend in enumerate(BACKENDS)
    ]


@pytest.mark.kills(
    tutorial_failed_worker_not_named="[04-several-workers-jax]",
    tutorial_table_of_strategies_outdated="[03-which-strategy-tensorflow]",
)
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("tutorial", "backend"), [case for place, path in enumerate(TUTORIALS) for case in runs(place, path)]
)
def test_tutorial_runs_and_says_the_same(tutorial: Path, backend: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.notebooks",
        "--backend",
        backend,
        "--to",
        str(tmp_path),
        str(tutorial),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # nbclient then ends its kernel
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"not finished within 300 s\n{output}")
    assert process.returncode == 0, output

    stored, executed = code_cells(tutorial), code_cells(tmp_path / tutorial.name)
    assert [cell.source for cell in executed] == [cell.source for cell in stored]
    assert not loud(executed)
    assert any(backend in text_of(cell) for cell in executed), f"it does not say that it ran on {backend}"
    stored_on = backend_of(stored)
    differences = [
        f"[{number}] {difference}"
        for number, (before, now) in enumerate(zip(stored, executed, strict=True), 1)
        if (difference := difference_of(before, now, stored_on != backend)) is not None
    ]
    assert not differences, "\n".join(differences)


def loud(cells: list[Any]) -> list[str]:
    """Returns the stderr output and the errors of cells."""
    return [
        output.get("text") or output.evalue
        for cell in cells
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def shows(source: str) -> bool:
    """Returns whether a cell shows output by itself, outside of the functions that it defines."""
    if source.startswith("%%"):
        return True
    later = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
    nodes = [node for node in ast.parse(source).body if not isinstance(node, later)]
    for node in nodes:  # the list grows in the loop
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in SHOWS:
            return True
        nodes.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, later))
    return False


@each_tutorial
def test_tutorial_is_stored_with_its_outputs(tutorial: Path) -> None:
    cells = code_cells(tutorial)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert not loud(cells)
    silent = [cell.source for cell in cells if shows(cell.source) and not cell.outputs]
    assert not silent, "Execute it anew: python -m tests.notebooks"
    assert any("same" in cell.metadata.get("tags", ()) for cell in cells), "nothing of it is compared"


@each_tutorial
def test_tutorial_is_stored_as_it_is_after_any_run(tutorial: Path) -> None:
    text = tutorial.read_text(encoding="utf-8")
    assert text == nbformat.writes(normalized(nbformat.reads(text, as_version=4))) + "\n"
    assert len(text) <= MOST_BYTES
    said = "".join(text_of(cell) for cell in code_cells(tutorial))
    assert not re.search(r"/(tmp|work|root|home)\b|\b0x[0-9a-f]{6,}", said), (
        "paths and addresses of a machine"
    )


@each_tutorial
def test_tutorial_opens_with_what_one_will_see(tutorial: Path) -> None:
    first = nbformat.read(tutorial, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    heading, _, rest = first.source.partition("\n\n")
    assert re.fullmatch(r"# \S.*", heading)
    assert len(rest.split()) > 5 and not rest.startswith(("#", "-", "!"))


@each_tutorial
def test_figures_are_told_to_who_cannot_see_them_and_look_alike(tutorial: Path) -> None:
    cells = code_cells(tutorial)
    drawn = [cell for cell in cells if any("image/png" in output.get("data", ()) for output in cell.outputs)]
    assert drawn
    for cell in drawn:
        assert len(cell.metadata.get("alt", "").split()) > 3, f"no `alt` in the metadata of\n{cell.source}"
    (look,) = (cell.source for cell in cells if "plt.rcParams" in cell.source)
    (first,) = (cell.source for cell in code_cells(TUTORIALS[0]) if "plt.rcParams" in cell.source)
    assert look == first, "copy the lines of the first tutorial"
