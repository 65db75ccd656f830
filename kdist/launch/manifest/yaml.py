"""Writes manifests as YAML, in which all parsers read strings as strings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

# Words without quotes: they start with a letter, and all parsers read them as strings. PyYAML would also omit
# the quotes of "1e3" and "y", which Kubernetes reads as a number and a boolean.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*([-./_]+[A-Za-z0-9]+)*")
_MEANS_SOMETHING = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Writes repeated objects in full, without YAML aliases."""
        return True


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _MEANS_SOMETHING
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent)


def dump(objects: Sequence[Any]) -> str:
    """Returns objects as YAML, one document each, keys in their order.

    Example:

    >>> from kdist.launch.manifest import yaml
    >>> print(yaml.dump([{"name": "train", "args": ["--epochs", "5"], "on": True}]), end="")
    name: train
    args:
    - "--epochs"
    - "5"
    "on": true
    """
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
