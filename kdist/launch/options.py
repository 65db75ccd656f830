"""Checks that the options of several commands have in common."""

from __future__ import annotations

import argparse

from kdist.errors import InvalidArgumentError


def whole_number(name: str, text: str, least: int) -> int:
    """Reads an option that is a whole number.

    Raises:
        InvalidArgumentError: If it is none, or too small.

    Example:

    >>> from kdist.launch.options import whole_number
    >>> whole_number("--max-restarts", "3", least=0)
    3
    """
    if not (text.isascii() and text.isdigit() and least <= int(text[:9])):
        raise InvalidArgumentError(
            f"{name} must be a whole number, at least {least}.", received={name.lstrip("-"): text}
        )
    return int(text[:9])


def target(options: argparse.Namespace, example: str) -> list[str]:
    """Returns the script, or with `-m` the module, and its arguments.

    Raises:
        InvalidArgumentError: If there is none; the message has the example.
    """
    rest = list(options.target)
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        raise InvalidArgumentError(
            "There must be a script to run, after kdist's own options.",
            received={"script": rest[0] if rest else None},
            hint=f"For example: {example}",
        )
    return rest
