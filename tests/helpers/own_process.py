"""Fails each test after which pytest's own process has a framework: tests run frameworks in workers."""

from __future__ import annotations

import sys

import pytest

FRAMEWORKS = ("tensorflow", "jax", "torch", "keras")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test, because nothing reads the exit status of a process of pytest-xdist."""
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if imported:
        pytest.fail(
            f"pytest's own process has imported {', '.join(imported)}, in {item.path.name} or before it.\n"
            "Import it in functions that run in workers, and return NumPy arrays from them, not tensors.",
            pytrace=False,
        )
