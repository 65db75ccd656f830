"""Fails each test that imports a framework in pytest's own process: frameworks belong in workers."""

from __future__ import annotations

import sys

import pytest

FRAMEWORKS = ("tensorflow", "jax", "torch", "keras")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fails a test, because pytest-xdist ignores the exit codes of its processes."""
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if imported:
        pytest.fail(
            f"pytest's own process has imported {', '.join(imported)}, in {item.path.name} or before it.\n"
            "Import it in functions that run in workers, and return NumPy arrays from them, not tensors.",
            pytrace=False,
        )
