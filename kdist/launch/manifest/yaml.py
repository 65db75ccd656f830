"""Writes dictionaries, lists, strings, numbers and truth values as YAML: all that a manifest consists of.

No package for it comes with kdist. Strings that are not plain words are put into double quotes, where YAML has
one escape for every character; so none of its rules on what else could be meant matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Plain words: they begin with a letter, and no reader takes them for something else.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*([-./_]+[A-Za-z0-9]+)*")
_MEANS_SOMETHING = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def dump(value: Any) -> str:
    """Returns a value as YAML, in block style, keys in their order.

    Args:
        value: A dictionary with string keys, a list, a string, an integer or a truth value; nested as they like.

    Example:

    >>> from kdist.launch.manifest import yaml
    >>> print(yaml.dump({"name": "train", "args": ["--epochs", "5"], "on": True}), end="")
    name: train
    args:
      - "--epochs"
      - "5"
    "on": true
    """
    if _is_nested(value):
        return "".join(f"{line}\n" for line in _lines(value))
    return f"{_scalar(value)}\n"


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) and len(value) > 0


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if _is_nested(entry):
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(entry))
            else:
                yield f"{_scalar(key)}: {_scalar(entry)}"
        return
    for entry in value:
        first, *rest = _lines(entry) if _is_nested(entry) else [_scalar(entry)]
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _MEANS_SOMETHING:
            return value
        return f'"{"".join(_character(c) for c in value)}"'
    if not value and isinstance(value, (Mapping, list, tuple)):
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{type(value).__name__} has no place in a manifest")


def _character(c: str) -> str:
    if c in '"\\':
        return f"\\{c}"
    return c if c.isprintable() else f"\\U{ord(c):08x}"
