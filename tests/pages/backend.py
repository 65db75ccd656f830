"""The second part of docs/contribute/a-backend.md: the methods of a backend, from the abstract classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.layers import ROOT

PAGE = ROOT / "docs" / "contribute" / "a-backend.md"
_MARK = "<!-- from here on written by `python -m tests.pages`, do not edit -->\n"
# In the order of the page.
CLASSES = (
    ("contract", "Backend"),
    ("contract", "Runtime"),
    ("contract", "StepFunction"),
    ("store", "Store"),
    ("stalls", "Board"),
    ("coordination", "Engine"),
    ("coordination", "Coordination"),
    ("coordination", "RemoteValue"),
    ("coordination", "PerWorkerValues"),
)


def abstract_classes() -> dict[tuple[str, str], ast.ClassDef]:
    """The abstract classes that all backends share, by module and name."""
    found = {}
    for path in sorted((ROOT / "kdist" / "backends").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "ABC" in map(ast.unparse, node.bases):
                found[path.stem, node.name] = node
    return found


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def _rows(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not (
            member.name.startswith("_") and member.name != "__call__"
        ):
            must = "abstractmethod" in map(ast.unparse, member.decorator_list)
            yield f"| `{member.name}` | {'yes' if must else ''} | {_first_line(member).replace('|', chr(92) + '|')} |"


def write() -> str:
    """Returns the page, whose first part is written by hand."""
    found = abstract_classes()
    lines = [PAGE.read_text(encoding="utf-8").partition(_MARK)[0] + _MARK]
    for module, name in CLASSES:
        node = found[module, name]
        lines += [f"## {name}\n", f"`kdist/backends/{module}.py`. {_first_line(node)}\n"]
        lines += ["| method | required | purpose |", "| --- | --- | --- |", *_rows(node), ""]
    return "\n".join(lines).rstrip() + "\n"
