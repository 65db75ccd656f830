"""Writes docs/reference/command-line.md: every command with its options, from the parser."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator

from kdist.command_line import build_parser

_WIDTH = 96
_HEAD = """\
# Command line

This page lists every command and option of kdist, as `kdist COMMAND --help` prints them. You can also run kdist as
`python -m kdist`, and `kdist run` as `kdist launch`. For examples, see [the launcher](../launcher.md). For exit codes,
see [Errors and exit codes](errors.md#exit-codes).
"""


def commands_of(
    parser: argparse.ArgumentParser, about: str = ""
) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yields a parser and the parsers of its commands, each with its line in the list of commands."""
    yield parser, about
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                if name in lines:  # not an alias
                    yield from commands_of(command, lines[name])


def _cell(words: str) -> str:
    return re.sub(r"\s+", " ", words).replace("|", "\\|")


def _option(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    names = [f"`{name}`" for name in action.option_strings]
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    if not names:
        names, value = [f"`{formatter._metavar_formatter(action, action.dest)(1)[0]}`"], ""
    shown = ", ".join(names) + (f" `{value}`" if value else "")
    help_text = action.help or ""
    if help_text:
        help_text = formatter._expand_help(action)
    return f"| {_cell(shown)} | {_cell(help_text).strip()} |"


def _rows(parser: argparse.ArgumentParser, formatter: argparse.HelpFormatter) -> Iterator[tuple[str, str]]:
    """Yields each option's row, after the title of its group."""
    for group in parser._action_groups:
        title = group.title or ""
        for action in group._group_actions:
            if action.help is not argparse.SUPPRESS and not isinstance(
                action, argparse._SubParsersAction | argparse._HelpAction
            ):
                yield (
                    ("" if title in ("options", "positional arguments") else title),
                    _option(action, formatter),
                )


def _with_groups(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yields the rows of a table: the title of each group, and its options."""
    last = ""
    for title, row in rows:
        if title != last:
            yield f"| **{title[0].upper()}{title[1:]}** | |"
        last = title
        yield row


def _common(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Returns the rows that all subcommands of a parser have."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            first, *others = (list(_rows(one, one._get_formatter())) for one in action.choices.values())
            return [row for row in first if all(row in other for other in others)]
    return []


def _section(
    parser: argparse.ArgumentParser, about: str, depth: int, above: list[tuple[str, str]]
) -> Iterator[str]:
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=_WIDTH)  # type: ignore[assignment]
    formatter = parser._get_formatter()
    words = parser.description or about
    yield f"{'#' * depth} {parser.prog}\n"
    if words:
        words = words.strip()
        yield f"{words[0].upper()}{words[1:]}{'' if words.endswith(('.', ':')) else '.'}\n"
    usage = re.sub(r"^(usage: | {7})", "", parser.format_usage(), flags=re.MULTILINE).rstrip()
    yield f"```text\n{usage}\n```\n"
    rows = [row for row in _rows(parser, formatter) if row not in above]
    if rows:
        yield "| option | meaning |\n| --- | --- |"
        yield from _with_groups(rows)
        yield ""
    if common := _common(parser):
        yield f"All commands of `{parser.prog}` take:\n"
        yield "| option | meaning |\n| --- | --- |"
        yield from _with_groups(common)
        yield ""
    if parser.epilog and "examples:" in parser.epilog:
        examples = parser.epilog.partition("examples:")[2].partition("\n\n")[0]
        lines = "\n".join(f"$ {line.strip()}" for line in examples.strip().splitlines())
        yield f"```console\n{lines}\n```\n"


def write() -> str:
    """Returns the page."""
    whole = build_parser()
    lines = [_HEAD]
    above: dict[str, list[tuple[str, str]]] = {}
    for parser, about in commands_of(whole):
        if parser is not whole:
            above[parser.prog] = _common(parser)
            common = above.get(parser.prog.rpartition(" ")[0], [])
            lines += _section(parser, about, len(parser.prog.split()), common)
    return "\n".join(lines).rstrip() + "\n"
