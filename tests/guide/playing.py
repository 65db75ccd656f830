"""Reads `snippets.md` and runs its sections."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.processes import BACKENDS

_BLOCK = re.compile(
    r"(?:^(?P<why>[^\n]+)\n\n)?^```python ?(?P<kind>\w*)(?P<where>[^\n]*)\n(?P<source>.*?)^```$", re.M | re.S
)
_TRANSLATED = {"tf.distribute.": "kdist.", "tf.keras.": "keras."}


@dataclass(frozen=True)
class Block:
    """A block of the file. `kind` is empty for a snippet, or "fails" for a snippet that fails somewhere."""

    kind: str
    source: str
    where: str
    error: str

    def expectation(self) -> AbstractContextManager[Any]:
        """Returns a context that requires an error, allows an error, or does nothing."""
        import keras

        from kdist.backends import get_backend

        backends = [name for name in BACKENDS if name in self.where] or BACKENDS
        if self.kind != "fails" or keras.backend.backend() not in backends:
            return contextlib.nullcontext()
        if "without gpus" in self.where and get_backend().list_devices("gpu"):
            return contextlib.suppress(Exception)
        return pytest.raises(Exception, match=re.escape(self.error))


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
            blocks.append(Block(found["kind"], source, found["where"], quoted[-1] if quoted else ""))
    return sections


SECTIONS = _read()


def play(title: str, changes: Mapping[str, str] | None = None, **names: Any) -> list[Any]:
    """Runs a section in a worker of a pool, and returns its results.

    Args:
        title: The title of the section.
        changes: Replacements in the source. They fix snippets that fail unchanged, and the blocks that would
            replace such a snippet do not run.
        **names: More names for the snippets, in addition to `tf`, `keras`, `kdist` and `worker`.
    """
    import keras
    import tensorflow as tf

    import kdist

    keras.utils.set_random_seed(2)
    names |= {"tf": tf, "keras": keras, "kdist": kdist, "worker": int(os.environ["RANK"])}
    results: list[Any] = []
    is_fixed = False
    with mock.patch.dict(os.environ):
        for number, block in enumerate(SECTIONS[title]):
            source = block.source
            for old, new in (changes or {}).items():
                source = source.replace(old, new)
            if block.kind == "result":
                results += [eval(line, names) for line in source.splitlines()]
                continue
            if block.kind == "instead" and is_fixed:
                continue
            is_fixed = block.kind == "fails" and source != block.source
            file = f"<{title}, block {number}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            with contextlib.nullcontext() if is_fixed else block.expectation():
                exec(compile(source, file, "exec"), names)
    return results


def play_all(titles: list[str]) -> dict[str, list[Any]]:
    """Runs several sections without changes."""
    return {title: play(title) for title in titles}
