"""These tests need JAX as Keras's backend, and a process in which JAX has not started yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("KERAS_BACKEND") == "jax":
        return
    for item in items:
        if _HERE in Path(item.path).parents and not item.path.name.endswith("_multi_process_test.py"):
            item.add_marker(pytest.mark.skip(reason="needs KERAS_BACKEND=jax, in a process of its own"))


@pytest.fixture(scope="session", autouse=True)
def three_cpus() -> None:
    """Creates the logical devices before any test computes anything."""
    if os.environ.get("KERAS_BACKEND") == "jax":
        from kdist.backends import get_backend

        get_backend().require_devices(["cpu:0", "cpu:1", "cpu:2"])
