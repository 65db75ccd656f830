"""Writes docs/contribute/a-backend.md: the lines of the toy backend, and all methods, from the abstract classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers.layers import ROOT

PAGE = ROOT / "docs" / "contribute" / "a-backend.md"
_MARK = "<!-- from here on written by `python -m tests.pages`, do not edit -->\n"
TOY = ROOT / "tests" / "backends" / "toy"
# In the order of the page.
CLASSES = (
    ("contract", "Backend"),
    ("contract", "Runtime"),
    ("replica", "Replica"),
    ("aggregation", "ReplicaScope"),
    ("contract", "StepFunction"),
    ("model_step", "ReplicatedSteps"),
    ("workers", "JoinedWorkers"),
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
            if isinstance(node, ast.ClassDef) and (
                "ABC" in map(ast.unparse, node.bases) or (path.stem, node.name) in CLASSES
            ):
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


def toy_lines() -> dict[str, int]:
    """Returns the number of lines of each class and function of the toy backend, and their sum as "The toy"."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(TOY.glob("*.py"))]
    nodes = [node for source in sources for node in ast.parse(source).body]
    found = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    return found | {"The toy": sum(len(source.splitlines()) for source in sources)}


def write() -> str:
    """Returns the page with its manual first part, in which only the numbers of lines change."""
    found, implemented, lengths = abstract_classes(), _implemented(), toy_lines()
    manual = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    manual = re.sub(r"`(\w+)` \(\d+ lines\)", lambda m: f"`{m[1]}` ({lengths[m[1]]} lines)", manual)
    manual = re.sub(r"The toy has \d+ lines", f"The toy has {lengths['The toy']} lines", manual)
    lines = [manual + _MARK]
    for module, name in CLASSES:
        node = found[module, name]
        lines += [f"## {name}\n", f"`kdist/backends/{module}.py`. {_first_line(node)}\n"]
        lines += [*_methods(node, implemented), ""]
    return "\n".join(lines).rstrip() + "\n"
