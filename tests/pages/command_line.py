"""docs/reference/command-line.md: every command with its options, from the parser."""

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
`python -m kdist`. `kdist launch` is an alias of `kdist run`. For examples, see [the launcher](../launcher.md). For exit
codes, see [Errors and exit codes](errors.md#exit-codes).
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


def _section(parser: argparse.ArgumentParser, about: str, depth: int) -> Iterator[str]:
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=_WIDTH)  # type: ignore[assignment]
    formatter = parser._get_formatter()
    words = parser.description or about
    yield f"{'#' * depth} {parser.prog}\n"
    if words:
        words = words.strip()
        yield f"{words[0].upper()}{words[1:]}{'' if words.endswith(('.', ':')) else '.'}\n"
    usage = re.sub(r"^(usage: | {7})", "", parser.format_usage(), flags=re.MULTILINE).rstrip()
    yield f"```text\n{usage}\n```\n"
    for group in parser._action_groups:
        options = [
            action
            for action in group._group_actions
            if action.help is not argparse.SUPPRESS
            and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if options:
            if group.title not in ("options", "positional arguments"):
                yield f"{group.title[0].upper()}{group.title[1:]}:\n"
            yield "| option | meaning |\n| --- | --- |"
            for action in options:
                yield _option(action, formatter)
            yield ""
    if parser.epilog and "examples:" in parser.epilog:
        examples = parser.epilog.partition("examples:")[2].partition("\n\n")[0]
        lines = "\n".join(f"$ {line.strip()}" for line in examples.strip().splitlines())
        yield f"```console\n{lines}\n```\n"


def write() -> str:
    """Returns the page."""
    whole = build_parser()
    lines = [_HEAD]
    for parser, about in commands_of(whole):
        if parser is not whole:
            lines += _section(parser, about, len(parser.prog.split()))
    return "\n".join(lines).rstrip() + "\n"
