"""You can paste from hints and pages: their commands parse, and their extras, variables and names of kdist exist."""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from kdist.command_line import build_parser
from tests.helpers.layers import ROOT
from tests.helpers.processes import run

# A command ends at the end of the line or of the code, or at the next command.
_COMMAND = re.compile(r"kdist ((?:--)?[a-z][^`\n|&;#]*)")
_NAME = re.compile(r"(?<![\w./-])kdist((?:\.[A-Za-z]\w*)+)")
_EXTRA = re.compile(r"kdist\[(\w+)\]|'\.\[(\w+)\]'")
_VARIABLE = re.compile(r"export (KDIST_\w+)")
# A call with placeholders or omitted parts is not a complete command.
_LEFT_OUT = re.compile(r"\[options\]|…|\.\.\.|COMMAND|(?<!\w)[A-Z](?!\w)")


def text_of(node: ast.expr) -> str:
    """Returns the text of a string, with "1" for each inserted value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return "1"
    return " ".join(text_of(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


@functools.cache
def hints() -> list[tuple[str, str]]:
    return list(read_hints())


def read_hints() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of all hints of errors and all examples of the command line."""
    for path in sorted((ROOT / "kdist").rglob("*.py")):
        parts: set[ast.AST] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword) and node.arg in ("hint", "epilog"):
                yield where, text_of(node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
                if "EXAMPLE" in ast.unparse(node.targets[0]):
                    yield where, text_of(node.value)
            elif (
                isinstance(node, (ast.Constant, ast.JoinedStr))
                and node not in parts
                and text_of(node).startswith(("kdist run ", "For example: "))
            ):
                yield where, text_of(node)
            if isinstance(node, ast.JoinedStr):  # `ast.walk` yields it before its parts
                parts.update(node.values)


def pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


parser = functools.cache(build_parser)


@functools.cache
def subcommands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def commands() -> list[tuple[str, str]]:
    """Returns the commands that users can run: in hints after introductory words, on pages after a prompt."""
    found = []
    for where, text in hints():
        for match in _COMMAND.finditer(text):
            word = match[1].split()[0]
            if word in subcommands() or text[: match.start()].endswith(("`", "example: ", "$ ")):
                found.append((where, match[1]))
    for where, line in pages():
        if prompt := re.match(r"\s*\w*\$ (?:[A-Z_]+=\S+ )*(kdist .*)", line):
            found += [(where, match[1]) for match in _COMMAND.finditer(prompt[1].split("  #")[0])]
    return found


def options_in_text() -> list[tuple[str, str]]:
    """Returns commands within sentences of pages and hints, often without all required arguments."""
    texts = [*hints(), *pages()]
    return [
        (where, match[1]) for where, text in texts for match in re.finditer(r"`kdist ([a-z][^`]*)`", text)
    ]


def problem_of(command: str) -> str | None:
    """Returns the parser's error for a command, or `None` if it accepts the command."""
    try:
        parser().parse_args(shlex.split(command, comments=True))
    except (argparse.ArgumentError, ValueError) as error:
        return str(error)
    except SystemExit as ended:
        return None if ended.code == 0 else "refused"
    return None


def test_every_command_that_is_written_to_be_run_parses(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(where, command) for where, command in commands() if not _LEFT_OUT.search(command)]
    wrong = {f"{where}: kdist {command}": problem_of(command) for where, command in found}
    said = capsys.readouterr().err
    assert {call: problem for call, problem in wrong.items() if problem} == {}, said
    assert len([where for where, _ in found if where.startswith("kdist/")]) > 15, "hints were found"
    assert len([where for where, _ in found if not where.startswith("kdist/")]) > 10, "pages were read"


def test_every_option_that_is_named_exists() -> None:
    wrong = []
    for where, call in options_in_text():
        command, *words = call.split()
        if command not in subcommands():
            wrong.append(f"{where}: kdist {command}")
            continue
        nested = [subcommands()[command]]
        for action in nested[0]._actions:
            if isinstance(action, argparse._SubParsersAction):
                nested += action.choices.values()
        known = {option for parser in nested for option in parser._option_string_actions}
        wrong += [
            f"{where}: kdist {command} {word}"
            for word in words
            if word.startswith("-") and word.split("=")[0] not in known
        ]
    assert wrong == []
    assert problem_of("run --no-such-option train.py") and problem_of("no-such-command")


def test_every_extra_and_variable_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "kdist").rglob("*.py")))
    known = set(re.findall(r'"(KDIST_\w+)"', sources))
    for where, text in [*hints(), *pages()]:
        named = {name for match in _EXTRA.findall(text) for name in match if name and name != "1"}
        assert named <= set(extras), f"{where}: {named - set(extras)}"
        variables = set(_VARIABLE.findall(text))
        assert variables <= known, f"{where}: {variables - known}"


def missing(names: list[str]) -> list[str]:
    """Returns the names that kdist does not have."""
    import importlib

    lacking = []
    for name in names:
        found = importlib.import_module("kdist")
        for part in name.removeprefix(".").split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                try:
                    found = importlib.import_module(f"{found.__name__}.{part}")
                except (ImportError, AttributeError):
                    lacking.append(name)
                    break
    return lacking


def test_every_name_of_kdist_in_a_hint_exists() -> None:
    named = {match[1]: where for where, text in hints() for match in _NAME.finditer(text)}
    assert len(named) > 20
    assert {f"{named[name]}: kdist{name}" for name in run("torch", 1, missing, sorted(named))[0]} == set()
