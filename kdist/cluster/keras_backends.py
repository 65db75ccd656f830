"""The backends of Keras that kdist or another package supports. This module imports none of them."""

from __future__ import annotations

import difflib
import importlib.util
from typing import TYPE_CHECKING

from kdist.errors import BackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

BACKENDS = ("tensorflow", "jax", "torch")  # also the package names


def added_backends(name: str) -> EntryPoints:
    """Returns the entry points with which installed packages add a backend of this name."""
    from importlib.metadata import entry_points  # takes longer to import than most of kdist

    return entry_points(group="kdist.backends", name=name)


def check_backend_name(name: str | None) -> None:
    """Checks that kdist supports a backend. `None` is not checked.

    Raises:
        BackendError: If the backend is unknown.
    """
    if name is not None and name.lower() not in BACKENDS and not added_backends(name.lower()):
        nearest = next(iter(difflib.get_close_matches(name.lower(), BACKENDS, cutoff=0.3)), "jax")
        raise BackendError(
            f"kdist does not support the Keras backend {name!r}.",
            received={"KERAS_BACKEND": name},
            hint=f"Choose one of {', '.join(BACKENDS)}: "
            f"kdist run --backend {nearest}, or export KERAS_BACKEND={nearest}",
        )


def check_backend(name: str | None) -> None:
    """Checks that kdist supports a backend and that it is installed, without importing it. Skips `None`.

    Raises:
        BackendError: If the backend is unknown, or if the backend or Keras is not installed.
    """
    check_backend_name(name)
    for package in () if name is None else (name.lower(), "keras"):
        if importlib.util.find_spec(package) is None:
            raise BackendError(
                f"Cannot use the backend {name!r}: the package {package!r} is not installed.",
                received={"KERAS_BACKEND": name},
                hint=f"In your checkout of kdist, run: pip install '.[{name}]'",
            )


def installed_backends() -> list[str]:
    """Returns the Keras backends whose packages are installed, without importing them.

    Example:

    >>> from kdist.cluster.keras_backends import BACKENDS, installed_backends
    >>> set(installed_backends()) <= set(BACKENDS)
    True
    """
    return [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
