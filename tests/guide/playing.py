"""Reads `snippets.md` and runs its sections."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.processes import BACKENDS

_BLOCK = re.compile(
    r"(?:^(?P<why>[^\n]+)\n\n)?^```python ?(?P<kind>\w*)(?: on (?P<on>[^\n]*))?\n(?P<source>.*?)^```$",
    re.M | re.S,
)
_TRANSLATED = {"tf.distribute.": "kdist.", "tf.keras.": "keras."}


@dataclass(frozen=True)
class Block:
    """A block of the file: `kind` is empty for a snippet; one that "fails" does so on `backends`, with that error."""

    kind: str
    source: str
    backends: tuple[str, ...]
    error: str


def _read() -> dict[str, list[Block]]:
    sections: dict[str, list[Block]] = {}
    text = (Path(__file__).parent / "snippets.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        blocks = sections[section.partition("\n")[0]] = []
        for found in _BLOCK.finditer(section):
            source = found["source"]
            for theirs, ours in _TRANSLATED.items():
                source = source.replace(theirs, ours)
            quoted = re.findall("`([^`]+)`", found["why"] or "")
            backends = tuple((found["on"] or " ".join(BACKENDS)).split())
            blocks.append(Block(found["kind"], source, backends, quoted[-1] if quoted else ""))
    return sections


SECTIONS = _read()


def play(title: str, changes: Mapping[str, str] | None = None, **names: Any) -> list[Any]:
    """In a worker of a pool: runs a section; returns its results.

    Args:
        title: Of the section.
        changes: What is written in place of something else. A snippet that fails as it stands is mended by them, and
            what would run instead of it does not.
        **names: What the snippets find beside `tf`, `keras`, `kdist` and `worker`.
    """
    import keras
    import tensorflow as tf

    import kdist

    keras.utils.set_random_seed(2)
    names |= {"tf": tf, "keras": keras, "kdist": kdist, "worker": int(os.environ["RANK"])}
    results: list[Any] = []
    is_mended = False
    with mock.patch.dict(os.environ):
        for number, block in enumerate(SECTIONS[title]):
            source = block.source
            for old, new in (changes or {}).items():
                source = source.replace(old, new)
            if block.kind == "result":
                results += [eval(line, names) for line in source.splitlines()]
                continue
            if block.kind == "instead" and is_mended:
                continue
            is_mended = block.kind == "fails" and source != block.source
            fails = block.kind == "fails" and keras.backend.backend() in block.backends and not is_mended
            file = f"<{title}, block {number}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            with (
                pytest.raises(Exception, match=re.escape(block.error)) if fails else contextlib.nullcontext()
            ):
                exec(compile(source, file, "exec"), names)
    return results


def play_all(titles: list[str]) -> dict[str, list[Any]]:
    """The same for several sections, without changes."""
    return {title: play(title) for title in titles}
