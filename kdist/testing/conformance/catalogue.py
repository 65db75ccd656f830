"""The cases of the conformance suite, read from their source: listing them imports neither Keras nor a framework."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from kdist.testing.conformance.case import ATOL, MODULES, RTOL

_ALL = ("tensorflow", "jax", "torch")
_DEFAULTS = {"why_not_all": "", "rtol": RTOL, "atol": ATOL}


@dataclass(frozen=True)
class Entry:
    """A case as its decorator describes it."""

    name: str
    group: str
    title: str
    backends: tuple[str, ...]
    why_not_all: str
    rtol: float
    atol: float


def catalogue() -> list[Entry]:
    """Returns all cases, in the order in which they stand in their modules."""
    folder = Path(__file__).parent
    return [entry for group in MODULES for entry in _read(folder / f"{group}.py", group)]


def _read(path: Path, group: str) -> list[Entry]:
    entries = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "case":
                options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                title = ast.literal_eval(call.args[0])
                backends = tuple(options.get("backends", _ALL))
                why, rtol, atol = (options.get(key, value) for key, value in _DEFAULTS.items())
                entries.append(Entry(node.name, group, title, backends, why, rtol, atol))
    return entries
