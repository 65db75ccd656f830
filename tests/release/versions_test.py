"""The version bounds in pyproject.toml match the tested versions in docs/versions.json."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests import versions
from tests.helpers.environment import ROOT
from tests.versions import BACKENDS, ENVIRONMENTS, NOTES, table

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TESTED = json.loads(NOTES.read_text(encoding="utf-8"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _oldest(what: str) -> tuple[int, ...]:
    """Returns the oldest version of a package that passed all cells: of its backend, or of any backend."""
    return min(
        _numbers(one["versions"][what])
        for one in TESTED.values()
        for backend, (passed, run) in one["cells"].items()
        if what in one["versions"] and passed == run and (what not in BACKENDS or backend == what)
    )


_SERVERS = [
    one for one in EXTRAS["servers"] if not one.startswith("cryptography")
]  # until the next `make matrix`
ASKED = [*PROJECT["dependencies"], *(EXTRAS[backend][0] for backend in BACKENDS), *_SERVERS]


@pytest.mark.parametrize("requirement", ASKED)
def test_the_oldest_that_is_asked_for_was_tested(requirement: str) -> None:
    name, _, floor = requirement.partition(">=")
    asked = _numbers(floor)
    assert asked, f"{requirement}: no bound"
    assert _oldest(name)[: len(asked)] == asked


def test_pythons_that_are_named_were_tested() -> None:
    tested = {_numbers(one["versions"]["python"])[:2] for one in TESTED.values()}
    prefix = "Programming Language :: Python :: 3."
    named = {(3, int(one.removeprefix(prefix))) for one in PROJECT["classifiers"] if one.startswith(prefix)}
    assert named == tested
    assert _numbers(PROJECT["requires-python"]) == min(tested)


def test_the_newest_are_those_that_kdist_is_developed_with() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    newest = TESTED["newest"]["versions"]
    for name, pin in (
        ("keras", "keras"),
        ("tensorflow", "tensorflow-cpu"),
        ("jax", "jax"),
        ("torch", "torch"),
    ):
        assert newest[name] == pins[pin]


def test_every_environment_has_a_row_and_every_backend_its_cells() -> None:
    rows = {one.name: one for one in ENVIRONMENTS}
    assert set(TESTED) <= set(rows)
    for name, one in rows.items():
        if one.alone is not None and name not in TESTED:
            continue  # prereleases are tested, but not supported
        assert set(TESTED[name]["cells"]) == set(one.backends)
        assert all(run >= 20 for _, run in TESTED[name]["cells"].values())


def test_a_cell_that_failed_shows() -> None:
    noted = {"versions": {"python": "3.11.7", "jax": "0.9.0"}, "cells": {"jax": [99, 100]}}
    lines = table({"some": noted}).splitlines()
    assert "| JAX | 0.9.0<br>✗ 99/100 |" in lines and "| PyTorch | – |" in lines


def test_a_run_without_failures_does_not_replace_a_run_of_more_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "NOTES", tmp_path / "versions.json")
    more, fewer, bad = {"jax-1": "passed", "jax-2": "passed"}, {"jax-3": "passed"}, {"jax-3": "failed"}
    for results, good, left in ((more, True, [2, 2]), (fewer, True, [2, 2]), (bad, False, [0, 1])):
        assert versions.note("newest", results) == good
        assert json.loads(versions.NOTES.read_text())["newest"]["cells"] == {"jax": left}
