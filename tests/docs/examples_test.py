"""Every Python example of the pages has a test, and the search for examples finds nothing else."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from tests.docs.examples import ELSEWHERE, EXAMPLES, example, examples_of
from tests.helpers.environment import ROOT


def test_each_example_has_a_test() -> None:
    defined = [
        node.name
        for path in sorted((ROOT / "tests" / "docs").glob("*_test.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name in EXAMPLES
    ]
    assert sorted([*defined, *ELSEWHERE]) == sorted(EXAMPLES), (
        "one function for each: see tests/docs/examples.py"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compile(name: str) -> None:
    compile(example(name), name, "exec")


def test_an_example_in_a_tab_is_for_its_backend() -> None:
    page = inspect.cleandoc("""
        ```python
        first
        ```

        === "JAX"

            ```python
            if second:
                pass
            ```

        === "one"

            ```python
            third
            ```

        ```python
        fourth
        ```
    """)
    assert examples_of(page) == [
        ("first\n", None),
        ("if second:\n    pass\n", "jax"),
        ("third\n", None),
        ("fourth\n", None),
    ]


def test_pages_have_no_other_fences_of_python() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = Path(page).read_text(encoding="utf-8")
        begun = [line for line in text.splitlines() if line.strip().startswith(("```py", "``` py", "~~~"))]
        assert len(begun) == len(examples_of(text)), page
