"""Type checkers find all public names of an installed kdist, although kdist loads them lazily."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdist
from tests.helpers.environment import ROOT
from tests.release.conftest import call

# The installation takes longer than the tests.
pytestmark = pytest.mark.in_turn(4)

MODULES = (
    "kdist",
    "kdist.callbacks",
    "kdist.cluster_resolver",
    "kdist.coordinator",
    "kdist.errors",
    "kdist.estimator",
    "kdist.experimental",
    "kdist.nn",
)
# Packages without types tell mypy nothing, and it takes long to read TensorFlow's sources.
CONFIG = """
[mypy]
strict = True
[mypy-keras.*,tensorflow.*,jax.*,torch.*,numpy.*,ml_dtypes.*,yaml.*,cloudpickle.*,ray.*,grpc.*]
follow_imports = skip
ignore_missing_imports = True
"""


def _public(module: str) -> list[str]:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None)
    if names is not None:
        return [*names]
    return [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]


@pytest.fixture(scope="module")
def said(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns mypy's output for a user's script, and for a file that reveals the type of each public name."""
    folder = tmp_path_factory.mktemp("types")
    shutil.copy2(ROOT / "tests" / "release" / "user_script.py", folder / "script.py")
    asked = [f"reveal_type({module}.{name})" for module in MODULES for name in _public(module)]
    (folder / "names.py").write_text("\n".join([*(f"import {m}" for m in MODULES), *asked]) + "\n")
    (folder / "mypy.ini").write_text(CONFIG)
    command = ["-m", "mypy", "--python-executable", str(installed), "--no-pretty", "--cache-dir", "cache"]
    done = call([sys.executable, *command, "script.py", "names.py"], folder, timeout=170)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(name)] for name in ("script.py", "names.py")}


@pytest.mark.kills("types_launch_is_a_module", "types_scope_of_any_strategy")
def test_a_users_script_is_typed(said: dict[str, list[str]]) -> None:
    assert said["script.py"] == []


def test_every_public_name_has_a_type(said: dict[str, list[str]]) -> None:
    errors = [line for line in said["names.py"] if ": error:" in line]
    assert errors == []
    types = [line.partition('Revealed type is "')[2].rstrip('"') for line in said["names.py"]]
    assert len(types) == sum(len(_public(module)) for module in MODULES)
    assert not [one for one in types if re.fullmatch(r"Any|Unknown|builtins\.object", one)]


def _for_types(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the names that a file imports for type checkers, with their modules."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                assert isinstance(inner, ast.ImportFrom)
                for alias in inner.names:
                    yield alias.asname or alias.name, str(inner.module)


@pytest.mark.kills(types_name_not_told="[kdist]")
@pytest.mark.parametrize("module", ["kdist", "kdist.callbacks", "kdist.coordinator"])
def test_the_lists_of_a_contents_page_agree(module: str) -> None:
    """The names to load lazily, the names for type checkers and the public names are the same."""
    page = importlib.import_module(module)
    told = dict(_for_types(Path(str(page.__file__))))
    homes = dict(page._HOME)
    if module == "kdist":
        homes |= dict.fromkeys(kdist._MODULES, "kdist") | {"launch": "kdist.launch.function"}
    assert told == homes
    assert page.__all__ == sorted({*homes} | ({"__version__"} if module == "kdist" else set()))
