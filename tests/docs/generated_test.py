"""The generated files in docs/ are up to date."""

from __future__ import annotations

import argparse

import pytest

from kdist.command_line import build_parser
from tests.pages import variables
from tests.pages.command_line import commands_of
from tests.pages.contents import PAGES, ROOT, content


@pytest.mark.kills(docs_option_not_as_on_the_page="[docs/reference/command-line.md]")
@pytest.mark.parametrize("path", PAGES)
def test_it_is_what_the_script_writes(path: str) -> None:
    assert (ROOT / path).read_bytes().decode("utf-8", "replace") == content(path).decode(
        "utf-8", "replace"
    ), "Write it anew: python -m tests.pages"


@pytest.mark.kills("docs_variable_without_a_meaning")
def test_each_variable_of_the_environment_has_a_meaning() -> None:
    meant = [name for meanings in variables.GROUPS.values() for name in meanings]
    assert len(meant) == len(set(meant))
    assert set(variables.found()) - set(meant) == set(), "say in tests/pages/variables.py what they mean"
    assert set(meant) - set(variables.found()) == set(), "kdist reads them no more"


def test_each_option_of_each_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    sections = {part.split("\n")[0].strip("# "): part for part in page.split("\n## kdist")[1:]}
    run = sections["run"]
    for option in ("--num-workers", "--evaluator-timeout", "--inject", "-m"):
        assert f"`{option}`" in run
    assert "SUPPRESS" not in page and "`target`" not in page


def test_each_option_has_a_help_text_that_ends_with_its_default() -> None:
    for parser, about in commands_of(build_parser()):
        assert about or parser.prog == "kdist", parser.prog
        for action in parser._actions:
            where, words = f"{parser.prog} {action.option_strings or action.dest}", action.help or ""
            if words == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
                continue
            assert words and not words.endswith("."), where
            assert action.option_strings == [] or action.nargs == 0 or action.metavar != "N", where
            if action.default not in (None, False, "", [], argparse.SUPPRESS):
                assert words.endswith(f"(default: {_shown(action.default)})"), where


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)
