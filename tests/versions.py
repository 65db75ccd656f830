"""Defines the tested versions of Python, Keras and the backends for `make matrix`, and records the results.

    python -m tests.versions NAME RESULTS

This writes the results of the contract (`--contract-results`) in this Python's environment to docs/versions.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- versions: written by `python -m tests.pages`, do not edit -->"
END = "<!-- end of the versions -->"

# Names on the page, and possible names of the installed packages.
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
PACKAGES = {
    "keras": ("keras", "keras-nightly"),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "jax": ("jax",),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "ml-dtypes": ("ml-dtypes",),
    "cloudpickle": ("cloudpickle",),
    "pyyaml": ("pyyaml",),
    "grpcio": ("grpcio",),
    "cryptography": ("cryptography",),
}
_OLD = ("keras==3.15.0", "cloudpickle==3.0.*", "pyyaml==6.0", "grpcio==1.60.*", "cryptography==42.*")
_NEW = ("cloudpickle", "pyyaml", "grpcio", "cryptography")
_NEWEST = (*_NEW, "keras", "tensorflow-cpu", "jax")


@dataclass(frozen=True)
class Environment:
    """Versions that are installed together.

    Args:
        name: The name of the environment.
        python: The version of Python.
        backends: The backends on which the contract runs.
        packages: The packages that pip installs.
        pinned: Whether constraints.txt determines the versions that `packages` does not set.
        alone: The package that pip installs last, without its dependencies, instead of Keras.
    """

    name: str
    python: str
    backends: tuple[str, ...]
    packages: tuple[str, ...] = field(repr=False)
    pinned: bool = True
    alone: str | None = None


# The contract's cases with a `tf.data.Dataset` need TensorFlow on every backend.
ENVIRONMENTS = (
    Environment(
        "oldest",
        "3.11",
        ("tensorflow", "torch"),
        (*_OLD, "numpy==1.26.*", "ml-dtypes==0.4.*", "tensorflow-cpu==2.18.0", "torch==2.13.0"),
        pinned=False,
    ),
    Environment("newest", "3.11", tuple(BACKENDS), (*_NEW, "keras", "tensorflow-cpu", "jax", "torch")),
    # These versions are newer than in constraints.txt, because the newest JAX needs Python 3.12.
    Environment("Python 3.12", "3.12", ("tensorflow", "jax"), _NEWEST, pinned=False),
    Environment("Python 3.13", "3.13", ("tensorflow", "jax"), _NEWEST, pinned=False),
    Environment(
        "coming Keras",
        "3.11",
        tuple(BACKENDS),
        (*_NEW, "tensorflow-cpu", "jax", "torch", "grain"),
        alone="keras-nightly",
    ),
)


def installed() -> Iterator[tuple[str, str]]:
    """Yields the names and versions of Python and of the packages in its environment."""
    yield "python", platform.python_version()
    found = {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in _distributions()}
    for name, candidates in PACKAGES.items():
        yield from ((name, found[one].partition("+")[0]) for one in candidates if one in found)


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    # Python imports the first distribution of a name, so this yields it last.
    yield from reversed([*importlib.metadata.distributions()])


def note(name: str, results: dict[str, str]) -> bool:
    """Records the results of the contract in this environment; returns whether all cells passed.

    A run without failures does not replace a run of more cells.

    Args:
        name: The name of the environment.
        results: The cells and their outcomes.
    """
    notes = json.loads(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}
    cells = {}
    for backend in BACKENDS:
        if outcomes := [outcome for cell, outcome in results.items() if cell.startswith(f"{backend}-")]:
            cells[backend] = [outcomes.count("passed"), len(outcomes)]
    before = [count for _, count in notes.get(name, {}).get("cells", {}).values()]
    if all(passed == run for passed, run in cells.values()) and sum(run for _, run in cells.values()) < sum(
        before
    ):
        return bool(cells)  # a run of more cells shows more
    versions = {what: version for what, version in installed() if what not in BACKENDS or what in cells}
    notes[name] = {"versions": versions, "cells": cells}
    known = [one.name for one in ENVIRONMENTS]
    notes = {one: notes[one] for one in known if one in notes}
    NOTES.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
    return bool(cells) and all(passed == run for passed, run in cells.values())


# "newest" contains the newest versions for Python 3.11, which constraints.txt pins.
_TITLES = {"newest": "development", "coming Keras": "Keras nightly"}


def table(notes: dict[str, Any]) -> str:
    """Returns the page's table, with one column per environment, so that it fits on a phone."""
    lines = [
        f"| | {' | '.join(_TITLES.get(name, name) for name in notes)} |",
        "| --- " * (len(notes) + 1) + "|",
    ]
    packages = {"python": "Python", "keras": "Keras", **BACKENDS, "numpy": "NumPy"}
    packages |= {name: name for name in ("ml-dtypes", "cloudpickle", "grpcio", "cryptography")}
    for key, name in packages.items():
        if key not in BACKENDS and not any(key in noted["versions"] for noted in notes.values()):
            continue  # not recorded yet
        lines.append(f"| {name} | {' | '.join(_cell(noted, key) for noted in notes.values())} |")
    return "\n".join(lines)


def _cell(noted: dict[str, Any], key: str) -> str:
    version = noted["versions"].get(key, "–")
    if key not in noted["cells"]:
        return version
    passed, run = noted["cells"][key]
    return f"{version}<br>{'✓' if passed == run else '✗'} {passed}/{run}"


def page() -> str:
    """Returns the text of the page with the current table."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    notes = json.loads(NOTES.read_text(encoding="utf-8"))
    return f"{head}{BEGIN}\n{table(notes)}\n{END}{tail}"


if __name__ == "__main__":
    name, path = sys.argv[1:]
    sys.exit(0 if note(name, json.loads(Path(path).read_text(encoding="utf-8"))) else 1)
