"""Lets asserts show their values in workers: rewrites test modules and helpers as pytest does."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import pytest
from _pytest.assertion import AssertionState
from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key


class _Config:
    """The parts of pytest's configuration that the rewriting needs, without the slow load of plugins."""

    def __init__(self) -> None:
        self.stash = pytest.Stash()
        self.trace = types.SimpleNamespace(root=types.SimpleNamespace(get=lambda name: lambda *words: None))

    def getini(self, name: str) -> Any:
        return {"python_files": ["*_test.py"], "enable_assertion_pass_hook": False}[name]


def install() -> None:
    """Rewrites the modules of `tests` that this process imports from now on."""
    if not any(isinstance(finder, AssertionRewritingHook) for finder in sys.meta_path):
        config = cast("pytest.Config", _Config())
        config.stash[assertstate_key] = AssertionState(config, "rewrite")
        hook = AssertionRewritingHook(config)
        hook._must_rewrite.add("tests")
        sys.meta_path.insert(0, hook)


install()
