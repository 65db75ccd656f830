"""A release has the right version, changelog and issue forms."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kdist
from tests.helpers.environment import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# The elements that GitHub supports, each with its required attribute.
ELEMENTS = {
    "dropdown": "options",
    "checkboxes": "options",
    "input": "label",
    "textarea": "label",
    "markdown": "value",
}


@pytest.mark.kills("release_without_its_changes")
def test_the_changes_of_this_version_are_listed_and_dated() -> None:
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None
    version, _, date = heading[1].partition(" ")
    assert version == kdist.__version__, "the newest heading of CHANGELOG.md and kdist/version.py"
    assert re.fullmatch(r"\(\d{4}-\d\d-\d\d\)", date), "## VERSION (YYYY-MM-DD)"
    datetime.date.fromisoformat(date.strip("()"))


def _check_element(element: dict[str, Any]) -> None:
    assert set(element) <= {"type", "id", "attributes", "validations"}
    assert element["attributes"][ELEMENTS[element["type"]]]
    assert isinstance(element["attributes"].get("label"), str) or element["type"] == "markdown"
    if element["type"] == "checkboxes":
        assert all(set(option) <= {"label", "required"} for option in element["attributes"]["options"])
    if element["type"] == "dropdown":
        options = element["attributes"]["options"]
        assert all(isinstance(option, str) for option in options)
        assert len(set(options)) == len(options)
    assert all(isinstance(value, bool) for value in element.get("validations", {}).values())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_is_one_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert set(form) <= {"name", "description", "title", "labels", "assignees", "body"}
    assert form["name"]
    assert form["description"]
    ids = [element["id"] for element in form["body"] if "id" in element]
    assert len(ids) == len(set(ids))
    for element in form["body"]:
        _check_element(element)


def test_there_are_forms() -> None:
    assert [path.name for path in FORMS] == ["bug.yml", "config.yml", "idea.yml"]
