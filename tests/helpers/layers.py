"""Defines the layers of kdist's packages, and reads the imports between them from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kdist

ROOT = Path(kdist.__file__).resolve().parents[1]
FILES = sorted((ROOT / "kdist").rglob("*.py"))
BACKENDS = ("tensorflow", "jax", "torch")

# From the lowest layer to the highest. A package imports only packages before it, even lazily or only for
# types. The framework packages ("engines") follow the data that they iterate over. Only `backends` imports
# them, by name.
ORDER = (
    "errors",
    "names",
    "version",
    "unsupported",
    "handlers",
    "values",
    "whole_files",
    "named",
    "cluster",
    "tracing",
    "control",
    "topology",
    "arrays",
    "communication",
    "context",
    "keras_hooks",
    "backends",
    "faults",
    "data",
    "engines",
    "strategies",
    "nn",
    "functions",
    "collectives",
    "synchrony",
    "checkpoint",
    "training",
    "coordinator",
    "estimator",
    "callbacks",
    "cluster_resolver",
    "experimental",
    "launch",
    "contents",  # kdist/__init__.py
    "parity",
    "testing",
    "demo",
    "measuring",
    "doctor",
    "command_line",
    "__main__",
)


@dataclass(frozen=True)
class Import:
    """An imported module, and whether the import is only for types, or inside a function."""

    path: Path
    line: int
    module: str
    for_types: bool
    lazy: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """Yields all imports of a file; `from a import b` counts as `a.b`, whether b is a module or not."""

    def visit(node: ast.AST, for_types: bool, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, for_types, lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield Import(path, node.lineno, f"{node.module}.{alias.name}", for_types, lazy)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            first = node.args[0] if node.args else None
            if name.endswith("import_module") and isinstance(first, ast.Constant):
                yield Import(path, node.lineno, str(first.value), for_types, lazy)
        for child in ast.iter_child_nodes(node):
            typed = for_types or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from visit(child, typed, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def module_of(path: Path) -> str:
    """Returns the name of a file's module, for example "kdist.cluster.tf_config"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imported_module(name: str) -> str:
    """Returns the module of kdist that contains an imported name, or "" for other libraries."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def package_of_module(module: str) -> str:
    """Returns a module's package in `ORDER`, for example "cluster" or "engines"."""
    parts = module.split(".")
    if parts[1:2] == ["backends"] and parts[2:3] and parts[2] in BACKENDS:
        return "engines"
    return parts[1] if len(parts) > 1 else "contents"


def package_of(path: Path) -> str:
    return package_of_module(module_of(path))


ALL_IMPORTS = [found for path in FILES for found in imports_of(path)]


def edges() -> list[tuple[str, str, Import]]:
    """Returns the imports between modules of kdist: importing module, imported module, statement."""
    found = [(module_of(one.path), imported_module(one.module), one) for one in ALL_IMPORTS]
    return [(here, there, one) for here, there, one in found if there and here != there]
