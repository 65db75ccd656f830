"""Searches the site in Python, and returns the pages in the order of the browser.

Material for MkDocs builds an index with lunr.js in the browser. This module does the same with lunr.py. It
splits texts at the separator of mkdocs.yml, searches for words by prefix, and prefers pages and full matches.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter


class Search:
    """Searches a built site.

    Args:
        site: The directory of the site.
    """

    def __init__(self, site: Path) -> None:
        index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
        config = index["config"]
        assert config["lang"] == ["en"] and config["pipeline"] == ["stopWordFilter"]
        self._separator = re.compile(config["separator"], re.ASCII)
        builder = Builder()
        builder.ref("location")
        builder.b(0)
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline.add(stop_word_filter)
        for field, settings in config["fields"].items():
            builder.field(field, settings["boost"], self._words_of(field))
        for document in index["docs"]:
            builder.add(document, {"boost": document.get("boost", 1)})
        self._index = builder.build()

    def pages(self, query: str) -> list[str]:
        """Returns the URLs of the pages for a query, best match first."""
        words = [word.lower() for word in self._separator.split(query) if word]
        scores = {}
        for match in self._index.search(" ".join(map(self._terms, query.lower().split()))):
            found = match["match_data"].metadata
            complete = sum(any(term.startswith(word) for term in found) for word in words) / len(words)
            page = "#" not in match["ref"]
            scores[match["ref"]] = match["score"] * (1 + (page + complete) ** 2)
        best = sorted(scores, key=lambda location: -scores[location])
        return list(dict.fromkeys(location.split("#")[0] for location in best))

    def _terms(self, part: str) -> str:
        # A word matches all words that start with it. Material looks up both halves of "multi-gpu" twice:
        # "multi gpu*".
        halves = part.split("-")
        words = [word for word in self._separator.split(part) if word]
        return (
            f"{part.replace('-', ' ')}* " * len(words)
            if len(halves) > 1
            else " ".join(f"{word}*" for word in words)
        )

    def _words_of(self, field: str) -> Any:
        def words(document: dict[str, Any]) -> list[str]:
            value = document.get(field) or ""
            texts = re.split("<[^>]*>", value if isinstance(value, str) else " ".join(value))
            return [word for text in texts for word in self._separator.split(text) if word]

        return words
