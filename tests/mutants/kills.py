"""The mark `kills` of tests, and the option `--kills` of pytest.

With `@pytest.mark.kills("a", "b")`, a test fails with each of the mutants a and b. With
`@pytest.mark.kills(c="[torch]")`, only items whose names contain this text fail with mutant c. Use a tuple
for several texts.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Texts of marks that no item's name contains; present only if pytest collected the whole suite.
UNMATCHED = pytest.StashKey[list[str]]()
_MARK = "pytest.mark.kills"


@dataclass(frozen=True)
class Kill:
    """A mutant in the mark of a test.

    Args:
        mutant: The name of the mutant.
        texts: The name of an item that fails contains one of them.
        file: The test file, relative to the root of the repository.
        function: The test function.
    """

    mutant: str
    texts: tuple[str, ...]
    file: Path
    function: str


def texts_of(names: Iterable[str], only: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the mutants of a mark, each with texts; the name of an item that fails contains one of them."""
    found = {name: (texts,) if isinstance(texts, str) else tuple(texts) for name, texts in only.items()}
    return dict.fromkeys(names, ("",)) | found


def find(root: Path) -> list[Kill]:
    """Returns the marks of all test files of a tree, read from their syntax trees.

    Raises:
        ValueError: A mark contains anything but literal strings.
    """
    return [kill for path in sorted((root / "tests").rglob("*_test.py")) for kill in _of_file(root, path)]


def _of_file(root: Path, path: Path) -> Iterator[Kill]:
    text = path.read_text(encoding="utf-8")
    if f"@{_MARK}" not in text:
        return
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for mark in function.decorator_list:
            if not (isinstance(mark, ast.Call) and ast.unparse(mark.func) == _MARK):
                continue
            try:
                names = [str(ast.literal_eval(name)) for name in mark.args]
                only = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
            except ValueError:
                raise ValueError(f"{path}:{mark.lineno}: {_MARK} takes literal strings") from None
            for mutant, texts in texts_of(names, only).items():
                yield Kill(mutant, texts, path.relative_to(root), function.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        action="append",
        default=[],
        metavar="MUTANT",
        help="run the tests that fail with this mutant, whether `make test` runs them this turn or not",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'kills(*mutants, **texts): fails with these mutants; mutant="[torch]" selects items by name',
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Runs before other hooks deselect items."""
    places = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    if places & {config.rootpath, config.rootpath / "tests"}:
        config.stash[UNMATCHED] = unmatched(items)
    if wanted := set(config.getoption("--kills")):
        kept = {item for item in items if wanted & set(killed_by(item))}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    return (yield)


def killed_by(item: pytest.Item) -> Iterator[str]:
    """Yields the mutants with which an item fails."""
    for mark in item.iter_markers("kills"):
        for mutant, texts in texts_of(mark.args, mark.kwargs).items():
            if any(text in item.name for text in texts):
                yield mutant


def unmatched(items: Iterable[pytest.Item]) -> list[str]:
    """Returns each text of a mark that none of its test's items contains in its name."""
    found: dict[str, bool] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        for mark in item.iter_markers("kills"):
            for mutant, texts in texts_of(mark.args, mark.kwargs).items():
                for text in texts:
                    key = f"{test}: {mutant}={text!r}"
                    found[key] = found.get(key, False) or text in item.name
    return [key for key, is_found in found.items() if not is_found]
