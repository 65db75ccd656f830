"""The differences in the tutorial on other libraries: their old sides are TensorFlow's guide, their new ones run."""

from __future__ import annotations

import ast
import itertools
import re

import nbformat

from tests.environment import ROOT

(TUTORIAL,) = (ROOT / "tutorials").glob("10-*.ipynb")
GUIDE = ROOT / "tests/guide/snippets.md"
# What needs a TPU, GPUs or a cluster, or is a hint, and is shown or told without being run.
TOLD = ("tpu", "cluster_resolver", "ParameterServerStrategy", "TF_CONFIG", "NCCL", "cross_device_ops")
API_PAGE = "## API page"


def sides(difference: str) -> tuple[str, str]:
    """The old and the new code of a difference."""
    lines = difference.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")  # type: ignore[return-value]


def statements(code: str) -> list[str]:
    """Each statement as Python reads it, whatever its lines and its comments."""
    return [ast.unparse(statement) for statement in ast.parse(code).body]


def executed_differences() -> list[tuple[str, str, str]]:
    """The old and the new side of each difference that a cell follows, and that cell."""
    cells = nbformat.read(TUTORIAL, as_version=4).cells
    return [
        (*sides(only[1]), after.source)
        for before, after in itertools.pairwise(cells)
        if (only := re.fullmatch(r"```diff\n(.*)\n```", before.source, re.DOTALL))
        and after.cell_type == "code"
    ]


def guide() -> list[str]:
    """The statements of the guide's own snippets."""
    text = GUIDE.read_text(encoding="utf-8").partition(API_PAGE)[0]
    blocks = re.findall(r"^```python(?: fails[^\n]*)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [statement for block in blocks for statement in statements(block)]


def test_what_runs_is_the_new_side() -> None:
    differences = executed_differences()
    assert len(differences) >= 11
    for _, new, cell in differences:
        assert new == cell


def test_old_sides_are_the_guide_s_snippets_and_all_of_them() -> None:
    snippets = guide()
    shown = [statement for old, *_ in executed_differences() for statement in statements(old)]
    assert [statement for statement in shown if statement not in snippets] == []
    missing = [one for one in snippets if one not in shown and not any(name in one for name in TOLD)]
    assert missing == []
