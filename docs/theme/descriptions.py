"""Gives each page the description that search engines and previews show: the first sentences of its text.

A hook of MkDocs.
"""

from __future__ import annotations

import re
from typing import Any

_LONGEST = 160
_NO_TEXT = ("#", "|", "!", "- ", "<", ":::", "=", "1.")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with the text of each page."""
    found = description(markdown)
    if found:
        page.meta.setdefault("description", found)
    return markdown


def description(markdown: str) -> str:
    """Returns the first sentences of a text that fit, without marks; at least one, which may be cut."""
    without_code = re.sub(r"^( *)(```+).*?^\1\2", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", without_code):
        words = " ".join(block.split())
        if not words or words.startswith(_NO_TEXT):
            continue
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", words)
        sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"[`*]", "", words).replace('"', "'"))
        said = sentences[0]
        for sentence in sentences[1:]:
            if len(said) + 1 + len(sentence) > _LONGEST:
                break
            said = f"{said} {sentence}"
        said = re.sub(r":$", ".", said)
        return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1].rsplit(' ', 1)[0]}…"
    return ""
