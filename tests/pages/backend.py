"""Writes the second part of docs/contribute/a-backend.md: a backend's methods, from the abstract classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.helpers.layers import ROOT

PAGE = ROOT / "docs" / "contribute" / "a-backend.md"
_MARK = "<!-- from here on written by `python -m tests.pages`, do not edit -->\n"
# In the order of the page.
CLASSES = (
    ("contract", "Backend"),
    ("contract", "Runtime"),
    ("contract", "StepFunction"),
    ("store", "Store"),
    ("stalls", "Board"),
    ("kept_gradients", "KeptGradients"),
    ("coordination", "Engine"),
    ("coordination", "Coordination"),
    ("coordination", "RemoteValue"),
    ("coordination", "PerWorkerValues"),
)


def abstract_classes() -> dict[tuple[str, str], ast.ClassDef]:
    """Returns the abstract classes that all backends share, by module and name."""
    found = {}
    for path in sorted((ROOT / "kdist" / "backends").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "ABC" in map(ast.unparse, node.bases):
                found[path.stem, node.name] = node
    return found


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def _implemented() -> set[str]:
    """Returns the names of all functions of the backends and of the parameter servers."""
    folders = [path for path in (ROOT / "kdist" / "backends").iterdir() if path.is_dir()]
    return {
        node.name
        for folder in (*folders, ROOT / "kdist" / "coordinator")
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def _methods(node: ast.ClassDef, implemented: set[str]) -> Iterator[str]:
    """Yields one line per method, without optional methods that no backend has."""
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or (
            member.name.startswith("_") and member.name != "__call__"
        ):
            continue
        required = "abstractmethod" in map(ast.unparse, member.decorator_list)
        if required or member.name in implemented:
            yield f"- `{member.name}`{'' if required else ' (optional)'}: {_first_line(member)}"


def write() -> str:
    """Returns the page with its manual first part."""
    found, implemented = abstract_classes(), _implemented()
    lines = [PAGE.read_text(encoding="utf-8").partition(_MARK)[0] + _MARK]
    for module, name in CLASSES:
        node = found[module, name]
        lines += [f"## {name}\n", f"`kdist/backends/{module}.py`. {_first_line(node)}\n"]
        lines += [*_methods(node, implemented), ""]
    return "\n".join(lines).rstrip() + "\n"
