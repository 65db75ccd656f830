"""Shows the `>>>` examples of docstrings as code: Markdown would take them for quotations.

An extension of Griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts fences around examples, which end at an empty line."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this with each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
