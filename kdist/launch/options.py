"""Help texts and checks of options that are common to several commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from kdist.errors import InvalidArgumentError

BACKEND_HELP = (
    "Keras backend: tensorflow, jax or torch (default: KERAS_BACKEND, then Keras's configuration file)"
)
ENV_HELP = "set an environment variable in all workers; repeatable"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def whole_number(name: str, text: str, least: int) -> int:
    """Parses an option whose value is a whole number.

    Raises:
        InvalidArgumentError: If the value is not a whole number, or less than `least`.

    Example:

    >>> from kdist.launch.options import whole_number
    >>> whole_number("--max-restarts", "3", least=0)
    3
    """
    if not (text.isascii() and text.isdigit() and least <= int(text[:9])):
        raise InvalidArgumentError(
            f"{name} is not a whole number of at least {least}.",
            received={name.lstrip("-"): text},
            hint=f"For example: {name} {max(least, 2)}",
        )
    return int(text[:9])


def environment_variables(entries: Sequence[str]) -> dict[str, str]:
    """Parses the values of `--env` into a dictionary.

    Raises:
        InvalidArgumentError: If an entry does not have the form NAME=VALUE.

    Example:

    >>> from kdist.launch.options import environment_variables
    >>> environment_variables(["A=1", "B="])
    {'A': '1', 'B': ''}
    """
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
            raise InvalidArgumentError(
                "The value of --env does not have the form NAME=VALUE.",
                received={"env": entry},
                hint="For example: --env OMP_NUM_THREADS=8",
            )
        variables[name] = value
    return variables


def target(options: argparse.Namespace, example: str) -> list[str]:
    """Returns the script (with `-m`, the module) and its arguments.

    Raises:
        InvalidArgumentError: If the script is missing. The message contains `example`.
    """
    rest = list(options.target)
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        raise InvalidArgumentError(
            "The script to run is missing.",
            received={"script": rest[0] if rest else None},
            hint=f"Pass a script after the options of kdist, for example: {example}",
        )
    return rest
