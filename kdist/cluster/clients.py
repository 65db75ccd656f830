"""Imports the official clients of cloud APIs when they are needed, and converts their errors."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from kdist.cluster.errors import ClusterImportError, ClusterRuntimeError
from kdist.errors import KdistError


def import_client(module: str, package: str, instead: str) -> Any:
    """Imports a module of a client.

    Args:
        module: The name of the module.
        package: The name of its package for `pip install`.
        instead: The argument that users can pass instead.

    Raises:
        ClusterImportError: If the module cannot be imported. It is also an `ImportError`.

    Example:

    >>> from kdist.cluster.clients import import_client
    >>> import_client("json", "json", "client").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ClusterImportError(
            f"Cannot import the package {package}, which this resolver needs.",
            received={"module": module, "error": str(error)},
            hint=f"Install it with `pip install {package}`, or pass `{instead}`.",
        ) from error


@contextlib.contextmanager
def asking(problem: str, hint: str) -> Iterator[None]:
    """Converts all errors of a client (no network, no permission, a missing field) into an error of kdist.

    Raises:
        ClusterRuntimeError: If the `with` block fails. It is also a `RuntimeError`.
    """
    try:
        yield
    except KdistError:
        raise
    except Exception as error:
        raise ClusterRuntimeError(
            problem,
            received={"error": f"{type(error).__name__}: {error}"[:500]},
            hint=hint,
        ) from error
