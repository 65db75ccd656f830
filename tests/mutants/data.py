"""Mutants as data: each entry of `tests/mutants/PACKAGE.toml` changes the source code so that one guarantee breaks.

    [torch_padding_gathered]
    promise = "Gathered rows contain no padding."
    file = "kdist/backends/torch/rows.py"
    old = "return gathered[:count]"
    new = "return gathered"

`old` occurs exactly once in the file. Several lines are whole lines between ''', with their indentation. Further
changes of the same mutant follow as tables `[[NAME.also]]` with `file`, `old` and `new`. Two keys are optional.
`limit = 60` changes the time limit of the tests (seconds). With `hang = true`, tests that exceed it count as failed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path("tests/mutants")
LIMIT = 300.0
_KEYS: dict[str, tuple[type, ...]] = {
    "promise": (str,),
    "limit": (int, float),
    "hang": (bool,),
    "also": (list,),
}
_CHANGE: dict[str, tuple[type, ...]] = {"file": (str,), "old": (str,), "new": (str,)}


@dataclass(frozen=True)
class Change:
    """One replacement in one file.

    Args:
        file: The file, relative to the root of the repository.
        old: The text to replace, which occurs once.
        new: The replacement.
    """

    file: Path
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A broken guarantee.

    Args:
        name: The name, which marks of tests contain.
        promise: The guarantee, in one sentence.
        changes: The changes, in the order in which they apply.
        limit: The time limit of its tests, in seconds.
        may_hang: Whether a test that exceeds the limit counts as failed.
    """

    name: str
    promise: str
    changes: tuple[Change, ...]
    limit: float = LIMIT
    may_hang: bool = False


def read(root: Path) -> list[Mutant]:
    """Returns the mutants of a tree, sorted by name.

    Raises:
        ValueError: An entry lacks a key, has an unknown one, or is in the wrong file.
    """
    found: dict[str, Mutant] = {}
    for path in sorted((root / DATA).glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
            mutant = parse(name, entry)
            if package_of(mutant.changes[0].file) != path.stem:
                raise ValueError(
                    f"{name}: belongs in {package_of(mutant.changes[0].file)}.toml, not {path.name}"
                )
            if name in found:
                raise ValueError(f"{name}: exists twice")
            found[name] = mutant
    return [found[name] for name in sorted(found)]


def parse(name: str, entry: Any) -> Mutant:
    """Returns the mutant of an entry.

    Raises:
        ValueError: The entry lacks a key, or has an unknown one.
    """
    if not name.isidentifier() or not isinstance(entry, dict):
        raise ValueError(f"{name}: must be a table, and its name an identifier")
    _check(name, entry, _KEYS | _CHANGE, ("promise", *_CHANGE))
    if not entry["promise"].endswith("."):
        raise ValueError(f"{name}: promise must be a sentence")
    changes = [entry, *entry.get("also", [])]
    for change in changes[1:]:
        _check(name, change, _CHANGE, tuple(_CHANGE))
    for change in changes:
        if not change["old"] or change["old"] == change["new"]:
            raise ValueError(f"{name}: old must not be empty, and new must differ from it")
    return Mutant(
        name,
        entry["promise"],
        tuple(Change(Path(c["file"]), c["old"], c["new"]) for c in changes),
        float(entry.get("limit", LIMIT)),
        entry.get("hang", False),
    )


def _check(
    name: str, entry: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: tuple[str, ...]
) -> None:
    if missing := [key for key in required if key not in entry]:
        raise ValueError(f"{name}: lacks {', '.join(missing)}")
    for key, value in entry.items():
        if key not in types or type(value) not in types[key]:
            raise ValueError(f"{name}: unknown key or wrong type: {key} = {value!r}")


def package_of(file: Path) -> str:
    """Returns the name of the data file for mutants of a source file, for example `backends_torch`.

    Mutants of files directly in kdist/ are in `top`.
    """
    parts = file.parent.parts
    return "_".join(parts[1:] if parts[:1] == ("kdist",) else parts) or "top"


def changed(mutant: Mutant, root: Path) -> dict[Path, str]:
    """Returns the new text of each file that a mutant changes.

    Raises:
        ValueError: `old` does not occur exactly once.
    """
    texts: dict[Path, str] = {}
    for change in mutant.changes:
        path = root / change.file
        if change.file not in texts and not path.is_file():
            raise ValueError(f"{mutant.name}: {change.file} does not exist")
        text = texts.get(change.file) or path.read_text(encoding="utf-8")
        if (count := text.count(change.old)) != 1:
            raise ValueError(
                f"{mutant.name}: old must occur once in {change.file}, and occurs {count} times:\n{change.old}"
            )
        texts[change.file] = text.replace(change.old, change.new)
    return texts


def apply(mutant: Mutant, root: Path) -> None:
    """Changes the files of a tree.

    Raises:
        ValueError: `old` does not occur exactly once.
    """
    for file, text in changed(mutant, root).items():
        (root / file).write_text(text, encoding="utf-8")
